"""Clipping: by each stage's own norm, and by the whole model's, of an earlier batch or of the same one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

import roundelay
from roundelay.actor.machine import Run
from roundelay.errors import PlanError
from roundelay.ir.clip import Clip
from roundelay.ir.micro_batch import MicroBatch, stream
from roundelay.ir.rule import rule_named
from roundelay.job import Job, Named
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.lower.verify_schedule import check_run, norm_read
from roundelay.planner.prove_plan import fired, prove
from roundelay.runtime import handlers
from roundelay.runtime.handlers import Context, do_update
from roundelay.session.training import Length, Session
from roundelay.simulator import simulate
from tests.equivalence.cells import VARIANTS, bench
from tests.lower.plans import ASYNCHRONOUS, plan_of

MOMENTUM: Callable[[Named], Optimizer] = partial(SGD, lr=0.05, momentum=0.9)
LONG = Length(steps=7)
SOME = ["1f1b", "pipedream", "cdp-v2", "spectrain improved mixed", "pipeoptim paper mixed"]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("model", ["mlp", "token_mean", "tied_head"])
@pytest.mark.parametrize("clip", ["stage:0.05", "previous:0.05"])
def test_clipping_verifies_under_every_kind_of_rule(clip: str, model: str, name: str) -> None:
    place = bench(model)
    found = place.verify(replace(place.plan(VARIANTS[name], 3, 3), clip=Clip.parse(clip)), place.job(MOMENTUM))
    assert found.equal, found.difference


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
@pytest.mark.parametrize("rule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("model", ["mlp", "skip", "token_mean", "frozen"])
def test_clipping_by_the_batch_s_own_norm_verifies(model: str, rule: str, transport: str) -> None:
    place = bench(model)
    found = place.verify(
        replace(place.plan(VARIANTS[rule], 4, 3, transport), clip=Clip.parse("global:0.05")), place.job(MOMENTUM)
    )
    assert found.equal, found.difference


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_an_earlier_batch_s_norm_verifies_between_processes(micro_batches: int, transport: str) -> None:
    place = bench("skip")
    plan = replace(place.plan(VARIANTS["pipedream"], 4, micro_batches, transport), clip=Clip.parse("previous:0.05"))
    found = place.verify(plan, place.job(MOMENTUM), steps=7)
    assert found.equal, found.difference


@pytest.mark.parametrize(
    ("name", "model", "transport", "clip"),
    [
        ("zb-h1", "skip", "memory", "global:0.05"),
        ("zb-h1 recompute", "token_mean", "shm", "global:0.05"),
        ("zb-h1 mixed", "tied_head", "gloo", "previous:0.05"),
        ("zb-v", "token_mean", "memory", "global:0.05"),
        ("zb-v", "mlp", "shm", "previous:0.05"),
        ("zb-v mixed", "frozen", "gloo", "global:0.05"),
    ],
)
def test_clipping_by_a_norm_that_is_whole_behind_second_halves_verifies(
    name: str, model: str, transport: str, clip: str
) -> None:
    place = bench(model)
    found = place.verify(
        replace(place.plan(VARIANTS[name], 4, 3, transport), clip=Clip.parse(clip)), place.job(MOMENTUM)
    )
    assert found.equal, found.difference


def test_where_no_gradient_travels_the_squares_still_do() -> None:
    """The first two of three stages train nothing, so nothing but the norm passes between them."""
    place = bench("mlp")
    last = list(place.model.parameters())[-2:]
    job = place.job(MOMENTUM)
    try:
        place.model.requires_grad_(False)
        for parameter in last:
            parameter.requires_grad_()
        captured = roundelay.capture(job)
        made = roundelay.plan(job, captured=captured, workers=3, rule="pipedream", micro_batches=1, cuts="equal")
        assert not any(edge.gradient for edge in made.edges)
        norms = used_norms(Session(job, captured, replace(made, clip=Clip.parse("previous:0.01")), 0, Length(steps=6)))
        assert norms[0] == norms[1] == norms[2]
        assert [norm is None for norm in norms[0]] == [True] * 3 + [False] * 3
        assert roundelay.verify(job, plan=replace(made, clip=Clip.parse("previous:0.01")), steps=6).equal
    finally:
        place.model.requires_grad_()


def used_norms(session: Session) -> list[list[float | None]]:
    """The norm by which each update of each stage was clipped."""
    seen: list[list[float | None]] = [[] for _ in session.plan.stages]

    def noting(context: Context, run: Run) -> MicroBatch | None:
        update = context.stage.update

        def noted(version: int, norm: float | None = None, *, saved: bool = False) -> None:
            seen[context.number].append(norm)
            update(version, norm, saved=saved)

        context.stage.update = noted  # type: ignore[method-assign]
        try:
            return do_update(context, run)
        finally:
            context.stage.update = update  # type: ignore[method-assign]

    session.run(notify=lambda event: None, handlers={k: {"update": noting} for k in range(len(seen))})
    return seen


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_every_stage_clips_by_the_norm_of_one_and_the_same_earlier_batch(micro_batches: int) -> None:
    """With a rate of zero the gradients of equal batches are equal, so that each batch is known by its norm."""
    place = bench("mlp")
    place.restore()
    still = partial(SGD, lr=0.0)
    batches = [tuple(part * (1 + t) for part in place.batches[0][:1]) + place.batches[0][1:] for t in range(7)]
    job = place.job(still, batches=lambda epoch: batches)
    given = [
        used_norms(
            Session(
                job, place.captured, replace(place.plan(VARIANTS[n], 3, micro_batches), clip=Clip.parse(c)), 0, LONG
            )
        )
        for n, c in (("1f1b", "global:1"), ("pipedream", "previous:1"), ("1f1b", "previous:1"), ("zb-h1", "previous:1"))
    ]
    own = given[0][0]
    assert len(set(own)) == 7
    late = ceil(3 / micro_batches)
    assert given[0] == [own] * 3
    assert given[1] == [[None] * late + own[: 7 - late]] * 3
    assert given[2] == given[3] == [[None, *own[:-1]]] * 3


@pytest.mark.parametrize("rule", ["gpipe", "1f1b", "zb-h1", *ASYNCHRONOUS])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 4), (5, 3)])
def test_the_norm_is_late_by_the_stages_over_the_micro_batches_rounded_up(
    rule: str, stages: int, micro_batches: int
) -> None:
    plan, counts = plan_of(rule, stages, micro_batches, clip="previous:1"), [micro_batches] * 9
    late = 1 if rule in ("gpipe", "1f1b", "zb-h1") else ceil(stages / micro_batches)
    ends = [(t + 1) * micro_batches - 1 for t in range(9)]
    assert [norm_read(read(plan), counts, g) for g in ends] == [max(-1, t - late) for t in range(9)]
    prove(plan)


def test_another_batch_s_norm_than_the_stated_one_is_refused() -> None:
    plan, counts = plan_of("pipedream", 3, 2, clip="previous:1"), [2, 2, 2, 1, 2]
    run = simulate(plan, emit(read(plan)), stream(counts))
    done = fired(run)
    check_run(read(plan), counts, done)
    at = next(i for i, f in enumerate(done[1]) if (f.opcode, f.g) == ("update", 6))
    done[1][at] = replace(done[1][at], entry=done[1][at].entry + 1)
    with pytest.raises(PlanError, match="stage 1, update after micro-batch 6: the newest norm: got batch 2's"):
        check_run(read(plan), counts, done)


@pytest.mark.parametrize("clip", ["previous:0.05", "global:0.05"])
@pytest.mark.parametrize("rule", ["1f1b", "zb-h1", "zb-v"])
def test_a_run_that_ignores_the_norm_is_found(rule: str, clip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = bench("mlp")
    plan = replace(place.plan(VARIANTS[rule], 3, 2), clip=Clip.parse(clip))
    assert place.verify(plan, place.job(MOMENTUM)).equal
    right = handlers._clipping_norm
    monkeypatch.setattr(handlers, "_clipping_norm", lambda context, run, header: right(context, run, header) and None)
    assert "update" in place.verify(plan, place.job(MOMENTUM)).difference


@pytest.mark.parametrize("tamper", ["order", "drop-update"])
@pytest.mark.parametrize("clip", ["previous:0.05", "global:0.05"])
def test_a_broken_run_is_found_beside_clipping(clip: str, tamper: str) -> None:
    place = bench("mlp")
    found = place.verify(
        replace(place.plan(VARIANTS["1f1b"], 3, 2), clip=Clip.parse(clip)), place.job(MOMENTUM), tamper=tamper
    )
    assert not found.equal


@pytest.mark.parametrize(
    ("workers", "clip", "rule"),
    [
        (1, "stage:0.1", "gpipe"),
        (1, "global:0.1", "gpipe"),
        (3, "global:0.1", "gpipe"),
        (1, "global:0.1", "zb-h1"),
        (3, "global:0.1", "zb-h1"),
        (2, "global:0.1", "zb-v"),
    ],
)
def test_clipping_is_torch_s_own(workers: int, clip: str, rule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    data = [(torch.randn(4, 5), torch.randint(0, 3, (4,))) for _ in range(4)]
    plain = copy.deepcopy(model)
    job = roundelay.Job(
        model=model,
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=partial(SGD, lr=0.5),
    )
    plan = roundelay.plan(job, workers=workers, rule=rule, micro_batches=1, clip=clip)
    result = roundelay.train(job, plan=plan, steps=4)
    optimizer = SGD(plain.parameters(), lr=0.5)
    for x, y in data:
        functional.cross_entropy(plain(x), y).backward()
        assert nn.utils.clip_grad_norm_(plain.parameters(), 0.1) > 0.1  # it acts
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(result.snapshot.parameters[name], parameter.detach())


@pytest.mark.parametrize("by", ["stage", "previous", "global"])
@pytest.mark.parametrize("norm", ["", ":0", ":-1", ":nan", ":1.0.0", ":1e999"])
def test_a_clip_that_says_nothing_is_refused(by: str, norm: str) -> None:
    with pytest.raises(
        PlanError, match=r"clip of the plan.*expected none, or stage:NORM, previous:NORM or global:NORM"
    ):
        prove(replace(plan_of("gpipe", 2, 2), clip=Clip.parse(by + norm)))


@pytest.mark.parametrize("rule", ASYNCHRONOUS)
def test_a_rule_that_never_flushes_cannot_wait_for_its_batch_s_own_norm(rule: str) -> None:
    assert rule_named(rule).schedule == "async-1f1b"
    with pytest.raises(PlanError, match=r"clip of the plan: got global:1.*never flushes.*Choose previous:NORM"):
        prove(plan_of(rule, 2, 2, clip="global:1"))


class ComplexLayer(nn.Module):
    """Complex weights between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.wave, self.head = nn.Linear(6, 8, dtype=torch.complex64), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.wave(x.to(torch.complex64)).abs())
        return result


@pytest.mark.parametrize("clip", ["none", "stage:0.1", "global:0.1"])
@pytest.mark.parametrize("kind", ["double", "complex"])
def test_gradients_of_doubles_and_of_complex_numbers_have_a_norm(kind: str, clip: str) -> None:
    torch.manual_seed(0)
    doubles = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    dtype = torch.float64 if kind == "double" else torch.float32
    data = [(torch.randn(8, 6, dtype=dtype), torch.randint(3, (8,))) for _ in range(4)]
    job = Job(
        model=doubles if kind == "double" else ComplexLayer(),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    result = roundelay.verify(job, workers=2, rule="1f1b", steps=3, clip=clip)
    assert result.exit_code == 0, result.differences()
