"""Runs whose stages are compiled: proved like any other, and refused in words where they cannot be had."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundelay.errors import PlanError
from roundelay.frontend.stages.compiled_segment import CompiledSegment, _key
from roundelay.frontend.stages.precision import DTYPES
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.planning.planning import capture, plan
from roundelay.proof.run_vs_reference import verify_session
from roundelay.session.training import Length, Session
from tests.api.jobs import make

STEPS = 7


def model() -> nn.Module:
    """Two halves that each draw random numbers."""
    torch.manual_seed(0)
    half = (nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.3))
    return nn.Sequential(*half, nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))


def batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
    """Two batches of eight rows and a short one."""
    rows = torch.Generator().manual_seed(epoch)
    return [(torch.randn(n, 6, generator=rows), torch.randint(3, (n,), generator=rows)) for n in (8, 8, 5)]


@pytest.fixture(scope="module")
def planned() -> tuple[Job, Any, Plan]:
    """A job, its model, and a plan that says that it is compiled."""
    job = make(model(), batches=batches)
    captured = capture(job)
    return job, captured, plan(job, workers=2, rule="pipeoptim", captured=captured, compile=True)


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_a_compiled_run_equals_the_reference_bit_for_bit_where_its_shapes_are_known_and_where_not(
    planned: tuple[Job, Any, Plan], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, captured, chosen = planned
    plain: list[int] = []
    found: list[int] = []
    original = CompiledSegment.__call__

    def counted(self: CompiledSegment, *args: Any) -> Any:
        (found if _key(args) in self.compiled else plain).append(args[-2].shape[0])
        return original(self, *args)

    monkeypatch.setattr(CompiledSegment, "__call__", counted)
    session = Session(job, captured, dataclasses.replace(chosen, transport=transport), 0, Length(steps=STEPS))
    result = verify_session(session)
    assert result.equal, result.difference
    share = {"memory": 2, "gloo": 1}[transport]  # forked workers count for themselves
    assert found == [8] * (share * 2 * 5)
    assert plain == [5] * (share * 2 * 2)


@pytest.mark.parametrize(
    ("rule", "backward", "precision"),
    [("1f1b", "stash", "fp16"), ("pipeoptim", "recompute", "bf16"), ("pipedream", "stash", "bf16")],
)
def test_a_compiled_run_computes_in_the_precision_of_its_plan(
    rule: str, backward: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _dtypes_made(monkeypatch)
    asked = {"rule": rule, "backward": backward, "workers": 2}
    lowered = asked | {"precision": precision} | ({"loss_scale": "256"} if precision == "fp16" else {})
    compiled, plain, full = (_losses(fields) for fields in (lowered | {"compile": True}, lowered, asked))
    assert made == {(True, DTYPES[precision]), (False, DTYPES[precision])}
    assert torch.allclose(compiled, plain, rtol=5e-3)
    assert not torch.allclose(compiled, full, rtol=1e-6)


def test_a_model_that_is_compiled_in_two_precisions_computes_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _dtypes_made(monkeypatch)
    job = make(model(), batches=batches)
    captured = capture(job)
    for precision, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        chosen = plan(job, captured=captured, workers=2, rule="1f1b", precision=precision, compile=True, cuts="equal")
        Session(job, captured, chosen, 0, Length(steps=3)).run(notify=lambda event: None)
        assert made == {(True, dtype), (False, dtype)}
        made.clear()


def _dtypes_made(monkeypatch: pytest.MonkeyPatch) -> set[tuple[bool, torch.dtype]]:
    """Filled with what segments give from now on: whether compiled, and the dtype."""
    made: set[tuple[bool, torch.dtype]] = set()
    original = CompiledSegment.__call__

    def noted(self: CompiledSegment, *args: Any) -> Any:
        results = original(self, *args)
        made.update((_key(args) in self.compiled, result.dtype) for result in results)
        return results

    monkeypatch.setattr(CompiledSegment, "__call__", noted)
    return made


def _losses(fields: dict[str, Any]) -> Tensor:
    """Losses of a run, which equals its reference."""
    result = verify_session(_session(fields))
    assert result.equal, result.difference
    return torch.tensor([update.loss for update in _session(fields).run(notify=lambda event: None).updates])


def _session(fields: dict[str, Any]) -> Session:
    job = make(model(), batches=batches)
    captured = capture(job)
    return Session(job, captured, plan(job, captured=captured, **fields), 0, Length(steps=STEPS))


def test_the_plan_says_it_and_its_text_keeps_it(planned: tuple[Job, Any, Plan]) -> None:
    assert Plan.parse(planned[2].text()).compile is True
    assert "compile = true" in planned[2].text()


def test_without_a_compiler_nothing_starts(planned: tuple[Job, Any, Plan]) -> None:
    from torch._inductor import config

    job, captured, chosen = planned
    session = Session(job, captured, chosen, 0, Length(steps=2))
    started: list[object] = []
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(PlanError, match="no C"):
        session.run(notify=started.append)
    assert started == []
