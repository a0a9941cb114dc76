"""What a worker is sent: it travels as bytes, and says of each stage which holder this worker is."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from roundelay.ir.plan import Plan
from roundelay.ir.work import Work
from tests.lower.plans import RULES, plan_of, replicated, works
from tests.test_cyclic import form

PLANS = {
    **{rule: plan_of(rule, 3, 4) for rule in RULES},
    "replicas": replicated(plan_of("1f1b", 2, 2, clip="global:1"), 3),
    "loss scale": plan_of("1f1b", 2, 2, precision="fp16", loss_scale="dynamic"),
    **{
        f"{layout} {rule}": form(layout, rule, 3, 2) for layout in ("dp", "mp", "zero") for rule in ("cdp-v1", "cdp-v2")
    },
}


@pytest.mark.parametrize("name", PLANS)
def test_it_travels_as_bytes(name: str) -> None:
    """Plain data: whoever reads it needs no plan, and unpickles nothing."""
    for work in works(PLANS[name]):
        assert msgspec.json.decode(msgspec.json.encode(work), type=Work) == work
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(work), type=Work) == work


def test_holders_are_numbered_by_replicas() -> None:
    sent = works(replicated(plan_of("1f1b", 2, 2), 3))
    found = {(own.stage, own.holder): (own.replica, own.place) for work in sent for own in work.stages}
    assert found == {(stage, holder): (holder, 0) for stage in (0, 1) for holder in (0, 1, 2)}
    assert all(own.updates for work in sent for own in work.stages)


def test_where_states_move_one_holder_updates() -> None:
    sent = works(form("zero", "cdp-v1", 3, 3))
    for stage in range(3):
        owners = [own.updates for work in sent for own in work.stages if own.stage == stage]
        assert sorted(owners) == [False, False, True]
        assert all(own.moves for work in sent for own in work.stages)


def test_sums_that_are_handed_on_have_a_memory() -> None:
    sent = works(form("dp", "cdp-v1", 3, 2))
    kinds = {c.id: c.kind for work in sent for c in work.program.channels}
    assert {kinds[own.sums] for work in sent for own in work.stages} == {"partial"}
    assert {own.sums for work in works(plan_of("1f1b", 2, 2)) for own in work.stages} == {-1}


def test_settings_are_the_plan_s() -> None:
    plan: Plan = replace(plan_of("1f1b", 2, 2, clip="global:0.5"), ema=0.9, deadline_s=7.0)
    (settings,) = {work.settings for work in works(plan)}
    assert (settings.ema, settings.deadline_s, str(settings.clip)) == (0.9, 7.0, "global:0.5")
    assert settings.needs_norm
    assert settings.awaits_norm
