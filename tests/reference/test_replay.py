"""The replay itself, against numbers worked out by hand: two stages with one weight each, and plain SGD.

Stage 0 is h = a²x, stage 1 is (bh − t)² / 2; the rate is 1/2 and all of Eq. (2)'s numbers are small integers:
W ← W − ½ ∇f(the W that the forward has read).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from roundelay.ir.averages import EMA
from roundelay.ir.clip import Clip
from roundelay.ir.micro_batch import stream
from roundelay.ir.rule import rule_named
from roundelay.reference import ReferenceStage, Replayed, ReplayedStage, Setting, replay
from roundelay.reference.run_inputs import Named, Tensors
from roundelay.reference.trainer import Recipe

XS, TS = (1.0, 2.0, 1.0, 3.0), (3.0, 0.0, 1.0, 2.0)
"""Inputs and targets by micro-batch."""


@dataclass(frozen=True)
class Functions:
    """What both stages have in common; a backward takes the weights that it is given."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def parts(self) -> Sequence[Any]:
        return (self,)


class First(Functions):
    """h = a²x; a buffer counts forwards."""

    def forward(self, params: Any, buffers: Tensors, inputs: Any, draw: Any, **_: Any) -> tuple[dict[str, Any], Any]:
        buffers["seen"] = buffers["seen"] + 1
        return {"h": params["a"] ** 2 * inputs["x"]}, inputs["x"]

    def backward(self, tape: Any, grad_outputs: Mapping[str, Any], params: Any) -> tuple[Tensors, Tensors]:
        return {}, {"a": grad_outputs["h"] * 2 * params["a"] * tape}


class Last(Functions):
    """(bh − t)² / 2, or, where its sum is divided by a count, with as many terms as t has units."""

    def forward(self, params: Any, buffers: Tensors, inputs: Any, draw: Any, **_: Any) -> tuple[dict[str, Any], Any]:
        loss = (params["b"] * inputs["h"] - inputs["t"]) ** 2 / 2
        counted = {"loss.count": inputs["t"]} if "loss.count" in self.outputs else {}
        return {"loss": loss, **counted}, (inputs["h"], inputs["t"])

    def backward(self, tape: Any, grad_outputs: Mapping[str, Any], params: Any) -> tuple[Tensors, Tensors]:
        (h, t), b = tape, params["b"]
        error = grad_outputs["loss"] * (b * h - t)
        return {"h": error * b}, {"b": error * h}


def scalar(value: float) -> torch.Tensor:
    """A number as weights are."""
    return torch.tensor(value, dtype=torch.float64)


def digest(values: Mapping[str, object]) -> str:
    """Not hashed: what it is of can be written down by hand."""
    return " ".join(f"{name}={value.item():g}" for name, value in sorted(values.items()) if torch.is_tensor(value))


def states(optimizer: Optimizer, own: Named) -> dict[str, dict[str, Any]]:
    """What SGD has of each parameter: its momentum, if it has one."""
    kept = {name: optimizer.state.get(parameter, {}) for name, parameter in own}
    return {name: {k: v for k, v in of.items() if v is not None} for name, of in kept.items() if of}


def replayed(  # noqa: PLR0913
    *letters: str,
    digests: tuple[Mapping[int, str], Mapping[int, str]] = ({}, {}),
    counts: Sequence[int] = (1, 1, 1, 1),
    start: tuple[float, float] = (1.0, 1.0),
    momentum: float = 0.0,
    flight: Mapping[int, Tensors] | None = None,
    first: tuple[int, int] = (0, 0),
    counted: bool = False,
    halving: bool = False,
    whole: bool = False,
    audit: Any = None,
    **setting: Any,
) -> tuple[Replayed, float, float]:
    """The replay of the letters of both stages; with both weights at its end."""
    outputs = ("loss", "loss.count") if counted else ("loss",)
    stages = [
        ReferenceStage([First(("x",), ("h",))], ("a",), ("seen",)),
        ReferenceStage([Last(("h", "t"), outputs)], ("b",), ()),
    ]
    given = [
        ReplayedStage(
            stage=stage,
            letters=own,
            digests=known,
            before=(0,) if k else (),
            behind=() if k else (1,),
            flight={} if k else flight or {},
        )
        for k, (stage, own, known) in enumerate(zip(stages, letters, digests, strict=True))
    ]
    named = [(name, torch.nn.Parameter(scalar(value))) for name, value in zip("ab", start, strict=True)]
    headers = stream(list(counts))[first[0] :]
    values = [{"x": scalar(x), "t": scalar(t)} for x, t in zip(XS, TS, strict=True)]
    make = partial(SGD, lr=0.5, momentum=momentum)
    scheduler = (lambda optimizer: LambdaLR(optimizer, lambda update: 0.5**update)) if halving else None
    found = replay(
        Setting(rule_named("ravnest"), "none", "stash", **setting),
        given,
        named,
        {"seen": scalar(0.0)},
        iter([[(header, values[header.g])] for header in headers]),
        Recipe(make, scheduler, None, first[1]),
        lambda number: number,
        digest,
        states,
        first,
        audit=audit,
        whole=whole,
    )
    return found, named[0][1].item(), named[1][1].item()


# --- Eq. (2), by hand


def test_both_forwards_read_the_first_weights() -> None:
    """a: ∇ = −2·2·1·1 = −4, then 8·2·1·2 = 32 at the forward's a = 1, where the newest is 3. b: −2, then 4·2 = 8."""
    found, a, b = replayed("FFBB", "FBFB")
    assert (a, b) == (1 + 2 - 16, 1 + 1 - 4)
    assert found.result.losses == {0: 2.0, 1: 8.0}


def test_the_second_forward_reads_what_the_first_update_made() -> None:
    """h = 9·2 = 18, error 2·18 = 36; a: 36·2·2·3·2 = 864; b: 36·18 = 648."""
    found, a, b = replayed("FBFB", "FBFB")
    assert (a, b) == (3 - 432, 2 - 324)
    assert found.result.losses == {0: 2.0, 1: 648.0}


def test_a_backward_is_at_the_weights_of_its_forward_on_every_stage() -> None:
    """Stage 1 reads b = 1 twice: errors −2 and 2, ∇b −2 and 4, ∇h −2 and 2; a: −4, and 2·2·1·2 = 8."""
    _, a, b = replayed("FFBB", "FFBB")
    assert (a, b) == (3 - 4, 2 - 2)


def by_hand(first: str, last: str) -> tuple[float, float]:
    """Eq. (2) in plain numbers: each stage does its letters as soon as the other has come so far."""
    weights, letters = [1.0, 1.0], [first, last]
    kept: list[dict[int, float]] = [{}, {}]
    values, gradients = {}, {}
    forwards, backwards, done = [0, 0], [0, 0], [0, 0]
    while done != [len(first), len(last)]:
        for k in (0, 1):
            if done[k] == len(letters[k]):
                continue
            if letters[k][done[k]] == "F" and (k == 0 or forwards[1] < forwards[0]):
                g = forwards[k]
                kept[k][g] = weights[k]
                values[g] = weights[0] ** 2 * XS[g] if k == 0 else values[g]
                forwards[k] += 1
            elif letters[k][done[k]] == "B" and (k == 1 or backwards[0] < backwards[1]):
                g = backwards[k]
                read = kept[k][g]
                if k == 1:
                    error = read * values[g] - TS[g]
                    gradients[g] = error * read
                    weights[1] -= 0.5 * error * values[g]
                else:
                    weights[0] -= 0.5 * gradients[g] * 2 * read * XS[g]
                backwards[k] += 1
            else:
                continue
            done[k] += 1
    return weights[0], weights[1]


def orders(count: int) -> list[str]:
    """All letters of a stage with so many micro-batches."""
    found = {""}
    for _ in range(2 * count):
        found = {own + letter for own in found for letter in "FB"}
        found = {o for o in found if o.count("F") <= count and o.count("B") <= o.count("F")}
    return sorted(found)


@given(st.sampled_from(orders(4)), st.sampled_from(orders(4)))
def test_whatever_the_order_was_it_is_eq_2(first: str, last: str) -> None:
    """An order that the other stage does not allow does not come to its end."""
    found, a, b = replayed(first, last, whole=True)
    if found.letters == 16:
        assert found.stuck == ()
        assert (a, b) == pytest.approx(by_hand(first, last), rel=1e-9)
    else:
        assert found.stuck != ()


def test_another_order_has_another_result() -> None:
    possible = [(first, last) for first in orders(3) for last in orders(3)]
    ended = [(a, b) for found, a, b in (replayed(*own, whole=True) for own in possible) if not found.stuck]
    assert len(ended) == 14
    assert len({*ended}) >= 13


# --- what else an update has


def test_a_digest_is_of_weights_buffers_and_the_optimizer_s_state_after_so_many_letters() -> None:
    """With momentum ½ the second steps are of −4/2 + 32 = 30 and −2/2 + 8 = 7."""
    first = {1: "a=1 seen=1", 3: "a=3 a momentum_buffer=-4 seen=2", 4: "a=-12 a momentum_buffer=30 seen=2"}
    last = {2: "b=2 b momentum_buffer=-2", 4: "b=-1.5 b momentum_buffer=7"}
    found, *_ = replayed("FFBB", "FBFB", digests=(first, last), momentum=0.5)
    assert (found.digests, found.differing) == (5, ())
    for wrong in ({3: "a=3 a momentum_buffer=-5 seen=2"}, {3: "a=4 a momentum_buffer=-4 seen=2"}):
        found, *_ = replayed("FFBB", "FBFB", digests=(first | wrong, last), momentum=0.5)
        assert found.differing == ((0, 3),)
    found, *_ = replayed("FFBB", "FBFB", digests=(first | {3: "a=3 a momentum_buffer=-4 seen=1"}, {}))
    assert (0, 3) in found.differing


def test_a_batch_of_two_is_updated_once_and_each_counts_half() -> None:
    """Both at a = b = 1: errors −2 and 2, halved; ∇b −1 and 2; ∇h −1 and 1; ∇a −2 and 4."""
    found, a, b = replayed("FFBB", "FFBB", counts=(2,))
    assert (a, b) == (1 - 1, 1 - 0.5)
    assert found.result.updates == 1


def test_a_sum_is_divided_by_its_batch_s_count() -> None:
    """t are 3 and 0: the sums −4 + 8 and −2 + 4 are divided by 3."""
    _, a, b = replayed("FFBB", "FFBB", counts=(2,), counted=True)
    assert (a, b) == pytest.approx((1 - 0.5 * 4 / 3, 1 - 0.5 * 2 / 3))


def test_gradients_are_clipped_by_their_stage_s_norm() -> None:
    """−4 and 32 become −1 and 1, −2 and what follows too."""
    _, a, b = replayed("FFBB", "FBFB", clip=Clip.parse("stage:1"))
    assert (a, b) == pytest.approx((1 + 0.5 - 0.5, 1 + 0.5 - 0.5), abs=1e-5)


def test_an_average_follows_each_update() -> None:
    """With decay ¾, a: 1, then 1 + ¼·2 = 1.5, then 1.5 + ¼·(−13 − 1.5)."""
    found, *_ = replayed("FFBB", "FBFB", ema=0.75)
    average = found.result.optimizer_state["a"][EMA].item()
    assert average == pytest.approx(1.5 - 14.5 / 4)
    found, *_ = replayed("FFBB", "FBFB", ema=0.75, ema_at={"a": scalar(9.0)})
    assert found.result.optimizer_state["a"][EMA].item() == pytest.approx((9 * 0.75 + 3 / 4) * 0.75 - 13 / 4)
    expected = {3: f"a=3 a {EMA}=1.5 seen=2"}
    found, *_ = replayed("FFBB", "FBFB", ema=0.75, digests=(expected, {}))
    assert (found.digests, found.differing) == (1, ())


def test_a_schedule_counts_the_updates_of_each_stage() -> None:
    """Rates ½ and ¼, or, after two updates, ⅛ and 1/16."""
    _, a, b = replayed("FFBB", "FBFB", halving=True)
    assert (a, b) == (3 - 8, 2 - 2)
    _, a, _ = replayed("FFBB", "FFBB", halving=True, first=(0, 2))
    assert a == 1 + 4 / 8 - 8 / 16


# --- where it begins, and where it ends


def test_forwards_in_flight_read_what_they_had_read() -> None:
    """The first of a's forwards read a = 1 before the run's a = 5; the second reads 5."""
    _, a, b = replayed("FB", "FB", start=(5.0, 1.0), flight={0: {"a": scalar(1.0)}})
    assert (a, b) == (5 + 2, 2)
    _, a, _ = replayed("FFBB", "FBFB", start=(5.0, 1.0), flight={0: {"a": scalar(1.0)}})
    error = 2 * 50
    assert a == 7 - 0.5 * error * 2 * 2 * 5 * 2


def test_it_begins_with_a_later_micro_batch_and_update() -> None:
    found, a, b = replayed("FB", "FB", first=(1, 7))
    assert found.result.losses == {1: 2.0}
    assert found.result.updates == 8
    assert (a, b) == (1 - 4, 1 - 2)


def test_letters_without_an_end_are_replayed_as_far_as_they_go() -> None:
    found, a, b = replayed("FFB", "FB")
    assert (found.letters, found.stuck, a, b) == (5, (), 3.0, 2.0)
    found, *_ = replayed("FFBBFF", "FBF")
    assert (found.letters, found.stuck) == (6, ()), "the other stage may have done more than it has told"


def test_letters_of_a_whole_run_must_be_all() -> None:
    found, *_ = replayed("FFB", "FB", whole=True)
    assert {stage for stage, _ in found.stuck} == {0, 1}
    found, *_ = replayed("FFBB", "FFBB", whole=True)
    assert found.stuck == ()


@pytest.mark.parametrize(
    ("first", "last", "stuck"),
    [
        ("BFFB", "FBFB", (0, 0)),
        ("FBB", "FBF", (0, 2)),
        ("FFBB", "FBBF", (1, 2)),
        ("FBF", "FFB", (1, 1)),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_what_nothing_can_allow_is_told_where_it_stands(
    first: str, last: str, stuck: tuple[int, int], whole: bool
) -> None:
    """Also where letters may be missing; the last is a ring, in which each waits for the other."""
    found, *_ = replayed(first, last, whole=whole)
    assert stuck in found.stuck
    if stuck != (1, 1):
        assert found.stuck[0] == stuck


def test_a_forward_beyond_the_data_waits() -> None:
    found, *_ = replayed("FBFBFBFBFB", "FBFBFBFBFB")
    assert (found.letters, found.stuck) == (16, ())
    found, *_ = replayed("FBFBFBFBFB", "FBFBFBFBFB", whole=True)
    assert {place for _, place in found.stuck} == {8}


def test_what_is_computed_is_told_as_it_comes() -> None:
    told: list[tuple[str, int, int]] = []
    replayed("FFBB", "FBFB", audit=lambda kind, stage, holder, number, tensors: told.append((kind, stage, number)))
    assert [own[1:] for own in told if own[0] == "forward" and own[1] == 0] == [(0, 0), (0, 1)]
    assert sorted(told) == sorted(
        (kind, stage, number) for kind in ("forward", "backward", "update") for stage in (0, 1) for number in (0, 1)
    )
    assert math.isfinite(sum(own[2] for own in told))
