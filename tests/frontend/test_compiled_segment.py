"""Compiled segments: the same mathematics, the same random numbers, and nothing of a run baked in."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tqdm import TMonitor

from roundelay.errors import CaptureError, PlanError
from roundelay.frontend import Captured, Mode, RngKey, capture
from roundelay.frontend.stages.compiled_segment import CompiledSegment, check_compiler
from roundelay.ir.stage import Partition
from roundelay.planning.stage_profiler import compile_for
from tests.frontend.cutting import Done, cut_after, differing, run, weights_of

ROWS = 8
BATCH = {"x": torch.randn(ROWS, 12, generator=torch.Generator().manual_seed(1))}
FAR = 0.3
"""Weights that are changed by so much give quite other gradients."""


class Model(nn.Module):
    """Buffers that change, dropout, and a view of a weight that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(12, 16), nn.BatchNorm1d(16)
        self.scale, self.two = nn.Parameter(torch.ones(16)), nn.Linear(16, 3)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.two(self.drop(nn.functional.gelu(self.norm(self.one(x)) * self.scale)))
        return made


def squares(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """A loss."""
    return (outputs * outputs).mean()


def captured_of(model: nn.Module) -> Captured:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return capture(model, squares, BATCH)


@functools.cache
def plain() -> tuple[Captured, Partition]:
    """The model in one stage, not compiled."""
    captured = captured_of(Model())
    return captured, cut_after(captured, [])


def compiled(mode: Mode) -> tuple[Captured, Partition]:
    """The model in one stage, compiled for :data:`BATCH` once."""
    captured, stages = plain()
    captured = captured.compiling(mode)
    compile_for(captured, stages, BATCH, range(len(stages.stages)))
    return captured, stages


def near(one: Done, other: Done) -> bool:
    """Whether loss, gradients and buffers are equal up to rounding."""
    pairs = [(one.loss, other.loss), *((g, other.grads[n]) for n, g in one.grads.items())]
    pairs += [(b, other.buffers[n]) for n, b in one.buffers.items()]
    return one.grads.keys() == other.grads.keys() and all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("mode", ["stash", "recompute", "mixed"])
def test_every_mode_computes_what_it_does_uncompiled_at_any_weights_and_with_the_same_dropout(
    mode: Mode,
) -> None:
    captured, stages = compiled(mode)
    first, later = weights_of(captured, FAR), weights_of(captured, FAR, seed=9)
    for draw in (RngKey(11, 5), RngKey((1 << 64) - 3, 6), RngKey(-4, 1 << 40)):
        ours = run(captured, stages, BATCH, first, later=later, mode=mode, draw=draw)
        again = run(captured, stages, BATCH, first, later=later, mode=mode, draw=draw)
        theirs = run(plain()[0], stages, BATCH, first, later=later, mode=mode, draw=draw)
        assert near(ours, theirs)
        assert not near(ours, run(plain()[0], stages, BATCH, first, later=later, mode=mode, draw=RngKey(11, 7)))
        assert differing(ours.grads, again.grads) == []
        assert differing(ours.buffers, again.buffers) == []
    other = run(plain()[0], stages, BATCH, first, later=later, mode="stash" if mode != "stash" else "mixed", draw=draw)
    assert not near(ours, other)  # the modes can be told apart


def test_the_compiled_code_is_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, stages = compiled("stash")
    calls = []
    for code in captured.builder.compiled.values():
        for key, function in list(code.compiled.items()):
            monkeypatch.setitem(code.compiled, key, _counting(function, calls))
    run(captured, stages, BATCH, weights_of(captured), mode="stash")
    assert len(calls) == 1


def _counting(function: Any, calls: list[int]) -> Any:
    def counted(*args: Any) -> Any:
        calls.append(1)
        return function(*args)

    return counted


def test_other_shapes_are_computed_by_the_uncompiled_piece_and_never_compiled_in_passing() -> None:
    captured, stages = compiled("stash")
    known = {key: len(code.compiled) for key, code in captured.builder.compiled.items()}
    short = {"x": BATCH["x"][:3].clone()}
    params = weights_of(captured, FAR)
    ours, theirs = (run(c, stages, short, params, mode="stash") for c in (captured, plain()[0]))
    assert torch.equal(ours.loss, theirs.loss)
    assert differing(ours.grads, theirs.grads) == []
    assert {key: len(code.compiled) for key, code in captured.builder.compiled.items()} == known


class Sized(nn.Module):
    """Reads in its second layer a number of rows that its first has made."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.size(0)
        made: Tensor = self.two(self.one(x).relu()) / rows
        return made


def test_a_number_that_enters_a_compiled_segment_is_a_constant_of_its_code() -> None:
    captured = captured_of(Sized())
    stages = cut_after(
        captured, [next(i for i, op in enumerate(captured.graph.ops) if op.target == "aten.relu.default")]
    )
    params = weights_of(captured)
    theirs = run(captured, stages, BATCH, params, mode="stash")
    captured = captured.compiling("stash")
    compile_for(captured, stages, BATCH, range(len(stages.stages)))
    numbers = [value for value in stages.stages[1].inputs if captured.graph.values[value].kind == "number"]
    assert numbers
    assert near(run(captured, stages, BATCH, params, mode="stash"), theirs)


def test_the_tape_of_a_compiled_stage_is_counted_without_its_weights() -> None:
    captured, stages = compiled("stash")
    made = run(captured, stages, BATCH, weights_of(captured), mode="stash", measure=True)
    assert 0 < made.forwards[0].tape.num_bytes < 16 * 4 * ROWS * 16


def test_compiling_leaves_no_thread_and_no_process() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, TMonitor):  # another test's library has started it, and none would be started beside it
            thread.exit()
    compiled("stash")
    assert [thread for thread in threading.enumerate() if "Monitor" in type(thread).__name__] == []
    children = Path(f"/proc/self/task/{threading.main_thread().native_id}/children")
    names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children.read_text().split()]
    assert [name for name in names if b"compile_worker" in name] == []


class Noisy(nn.Module):
    """Draws random numbers by an operator other than dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.one(x + torch.rand_like(x))
        return made


def test_a_random_operation_that_cannot_be_compiled_is_refused_by_its_name() -> None:
    captured = captured_of(Noisy()).compiling("stash")
    with pytest.raises(CaptureError, match=r"rand_like.*Leave --compile out"):
        compile_for(captured, cut_after(captured, []), BATCH, [0])


def test_an_error_inside_the_compiler_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_of(Noisy()).compiling("stash")
    monkeypatch.setattr(CompiledSegment, "_compile", lambda self, args: _fails)
    with pytest.raises(CaptureError, match=r"TypeError: no such kernel.*Leave --compile out"):
        compile_for(captured, cut_after(captured, []), BATCH, [0])


def test_an_interrupt_inside_the_compiler_is_none_of_its_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_of(Noisy()).compiling("stash")
    monkeypatch.setattr(CompiledSegment, "_compile", lambda self, args: _is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_for(captured, cut_after(captured, []), BATCH, [0])


def _fails(*args: Any) -> Any:
    raise TypeError("no such kernel")


def _is_interrupted(*args: Any) -> Any:
    raise TypeError("a size: KeyboardInterrupt")


def test_a_missing_compiler_is_told_before_anything_is_compiled() -> None:
    from torch._inductor import config

    check_compiler()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(PlanError, match=r"no C\+\+ compiler.*g\+\+"):
        check_compiler()
