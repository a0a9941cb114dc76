"""Stages and losses as data: the bits of the captured ones, here and elsewhere; what cannot travel is named."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from roundelay.errors import CaptureError, JobError
from roundelay.frontend import Captured, RngKey, capture
from roundelay.frontend.batch import as_tensor
from roundelay.frontend.plain_stage import plain_stage, rebuilt
from roundelay.frontend.stages.remat_segment import RematSegment
from roundelay.ir.graph import COUNT, LABELS, LOSS
from roundelay.ir.plain_bytes import decoded, encoded
from roundelay.lower.partition import partition
from tests.frontend.cutting import (
    MODES,
    Done,
    backwards,
    cut_after,
    differing,
    even_cuts,
    forwards,
    run,
    weights_of,
)
from tests.frontend.plain import CPU, Plain, ask, run_stage, tensors
from tests.zoo import MODELS, ZOO, rows

EVERY = pytest.mark.parametrize("name", MODELS)
SHORT = ("mlp", "views", "tied_head", "two_inputs", "lstm", "batchnorm", "dropout_heavy", "token_mean")


@functools.cache
def captured_of(name: str) -> Captured:
    """A model of the zoo, or a whole network."""
    entry = MODELS[name]
    return capture(entry.build(0), entry.loss, batch_of(name), entry.inputs)


def batch_of(name: str, seed: int = 1, size: int = 4) -> Any:
    """Some rows of a model's data."""
    return rows(MODELS[name].batches(seed, 1)[0], 0, size)


def same(one: Done, two: Done) -> list[str]:
    """What differs between two runs: outputs, gradients, buffers."""
    found = [*differing(one.grads, two.grads), *differing(one.buffers, two.buffers)]
    for a, b in zip(one.forwards, two.forwards, strict=True):
        found += differing(tensors(a.outputs), tensors(b.outputs))
        found += [
            name for name, value in a.outputs.items() if not isinstance(value, Tensor) and b.outputs[name] != value
        ]
    for a, b in zip(one.leaving, two.leaving, strict=True):
        found += differing(a, b)
    return found


@EVERY
def test_a_stage_that_was_bytes_has_the_bits_of_the_captured_one(name: str) -> None:
    captured, batch = captured_of(name), batch_of(name, 7)
    cut, params = even_cuts(captured, 2), weights_of(captured, 0.05)
    plain: Any = Plain(captured, cut)
    for halved in (False, True):
        wanted = run(captured, cut, batch, params, halved=halved)
        assert same(wanted, run(plain, cut, batch, params, halved=halved)) == []
        assert wanted.grads
    for spec in cut.stages:
        assert roles(plain.stage(spec, halved=True).segments) == roles(captured.stage(spec, halved=True).segments)


def roles(segments: Any) -> list[Any]:
    """Names of segments, and what becomes of them."""
    return [
        (one.spec, one.trainable, one.differentiable, one.mutated, one.halves and one.halves.late) for one in segments
    ]


@pytest.mark.parametrize("name", [name for name in ZOO if name != "t5"])
def test_in_half_precision_too(name: str) -> None:
    captured, batch = captured_of(name).lowering("bf16"), batch_of(name, 7)
    cut, params = even_cuts(captured, 2), weights_of(captured, 0.05)
    plain: Any = Plain(captured, cut)
    assert same(run(captured, cut, batch, params), run(plain, cut, batch, params)) == []
    wanted = run(captured, cut, batch, params, halved=True)
    assert same(wanted, run(plain, cut, batch, params, halved=True)) == []
    assert differing(wanted.grads, run(captured_of(name), cut, batch, params).grads) != []


@pytest.mark.parametrize("name", SHORT)
def test_every_cut_mode_and_another_number_of_rows(name: str) -> None:
    captured, old = captured_of(name), weights_of(captured_of(name), 0.05)
    new = weights_of(captured, 0.05, seed=4)
    for i, place in enumerate(captured.graph.cuts):
        cut = cut_after(captured, [place])
        plain: Any = Plain(captured, cut)
        batch, mode = batch_of(name, 7, 2 + i % 4), MODES[i % 3]
        wanted = run(captured, cut, batch, old, later=new, mode=mode)
        assert same(wanted, run(plain, cut, batch, old, later=new, mode=mode)) == [], place


def test_elsewhere_without_any_of_the_persons_code(tmp_path: Path) -> None:
    wanted: dict[Path, dict[str, Tensor]] = {}
    for name in MODELS:
        captured, batch = captured_of(name), batch_of(name, 7)
        cut, params = even_cuts(captured, 2), weights_of(captured, 0.05)
        buffers = {n: b.clone() for n, b in captured.buffers().items()}
        made = forwards(captured, cut, batch, params, {**buffers})
        _, entering, _ = backwards(made, params)
        for one, grads in zip(made, entering, strict=True):
            if any(not isinstance(value, Tensor) for value in one.inputs.values()):
                continue
            parts = {"params": one.params, "buffers": {n: buffers[n] for n in one.spec.buffers}, "inputs": one.inputs}
            given = {part: tensors(named) for part, named in {**parts, "grads": grads}.items()}
            folder = tmp_path / name / str(one.spec.stage)
            ask(folder, encoded(plain_stage(captured, one.spec)), given)
            for halved in (False, True):
                wanted[folder / f"found-{halved}.safetensors"] = run_stage(
                    captured.stage(one.spec, halved=halved), given
                )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "tests.frontend.plain", str(tmp_path)], check=True, env=env, timeout=100)
    assert len(wanted) > 3 * len(MODELS)
    for path, own in wanted.items():
        assert differing(load_file(path), own) == [], path


def test_recomputed_segments_stay_so() -> None:
    captured, batch = captured_of("gpt2"), batch_of("gpt2", 7)
    module = "transformer.h.0.attn"
    ends = [captured.graph.ops[captured.graph.cuts[len(captured.graph.cuts) // 2]].name]
    cut = partition(captured.graph, [ends, [captured.graph.ops[-1].name]], [module])
    plain: Any = Plain(captured, cut)
    segments = plain.stage(cut.stages[0]).segments
    assert [isinstance(one, RematSegment) for one in segments] == [
        i in cut.stages[0].recomputed for i in range(len(segments))
    ]
    assert cut.stages[0].recomputed
    params = weights_of(captured, 0.05)
    for mode in MODES:
        assert same(run(captured, cut, batch, params, mode=mode), run(plain, cut, batch, params, mode=mode)) == []


Loss = Callable[[Any, Any], Any]
CLASSES = torch.tensor([0.5, 1.0, 2.0])


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data(size: int = 4) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(size)
    labels = torch.randint(0, 3, (size,), generator=generator)
    return {"x": torch.randn(size, 6, generator=generator), "labels": labels, "scale": 2.0}


def captured_with(loss: Loss) -> Captured:
    return capture(model(), loss, data(), lambda batch: ((batch["x"],), {}))


def entropy(outputs: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(outputs, batch["labels"])


def weighted(outputs: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(outputs, batch["labels"], weight=CLASSES, label_smoothing=0.1)


def counted(outputs: Tensor, batch: Any) -> tuple[Tensor, Any]:
    return functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(batch["labels"])


def with_metrics(outputs: Tensor, batch: Any) -> dict[str, Any]:
    right = (outputs.argmax(-1) == batch["labels"]).float()
    return {"loss": entropy(outputs, batch), "accuracy": right.mean(), "seen": (right.sum(), right.numel())}


def in_place(outputs: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(outputs.mul_(2.0), batch["labels"])


def dropped(outputs: Tensor, batch: Any) -> Tensor:
    return entropy(functional.dropout(outputs, 0.5) + 0.1 * torch.randn_like(outputs), batch)


def scaled(outputs: Tensor, batch: Any) -> Tensor:
    return entropy(outputs, batch) * batch["scale"]


def made_here(outputs: Tensor, batch: Any) -> Tensor:
    places = torch.arange(outputs.size(0))
    return -(functional.log_softmax(outputs, -1)[places, batch["labels"]] * torch.tensor(3.0)).mean()


@pytest.mark.parametrize("loss", [entropy, weighted, counted, with_metrics, in_place, dropped, scaled, made_here])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_has_the_bits_of_the_persons_function_on_any_number_of_rows(loss: Loss, precision: str) -> None:
    captured = captured_with(loss).lowering(precision)
    cut, params = even_cuts(captured, 2), weights_of(captured)
    plain: Any = Plain(captured, cut)
    for size in (1, 2, 4, 9):
        wanted, found = (run(of, cut, data(size), params) for of in (captured, plain))
        assert same(wanted, found) == []
        assert wanted.forwards[-1].outputs.keys() == found.forwards[-1].outputs.keys()


def test_counts_labels_and_metrics_come_with_it() -> None:
    names = []
    for loss in (counted, entropy, with_metrics):
        captured = captured_with(loss)
        cut = cut_after(captured, [0])
        names.append({*Plain(captured, cut).stage(cut.stages[1]).outputs})
    assert names[0] == {LOSS, COUNT}
    assert names[1] == {LOSS, LABELS}
    assert {LOSS, "metric.accuracy", "metric.seen", "metric-count.seen"} <= names[2]


def test_random_numbers_of_a_loss_are_keyed() -> None:
    captured = captured_with(dropped)
    cut, params = even_cuts(captured, 1), weights_of(captured)
    plain: Any = Plain(captured, cut)
    one, again, other = (run(plain, cut, data(), params, draw=RngKey(3, g)).loss for g in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def branches(outputs: Tensor, batch: Any) -> Tensor:
    loss = entropy(outputs, batch)
    return loss if loss > 0.5 else loss * 2.0


def of_python(outputs: Tensor, batch: Any) -> Tensor:
    return entropy(outputs, batch) * (1.0 if outputs.shape[0] < 3 else 3.0)


def spectrum(outputs: Tensor, batch: Any) -> Tensor:
    return entropy(outputs, batch) + torch.linalg.svdvals(outputs).sum()


def refuses(loss: Loss, match: str) -> None:
    captured = captured_with(loss)
    with pytest.raises(CaptureError, match=match) as raised:
        plain_stage(captured, even_cuts(captured, 1).stages[0])
    assert "machines that join get data, and no Python" in str(raised.value)


def test_a_loss_that_branches_on_a_value_is_refused_with_its_line() -> None:
    refuses(branches, r"the loss, .*test_plain_stage.py:\d+ `return loss if loss > 0.5 .*Python branches")


def test_an_operation_of_a_loss_that_may_not_travel_is_named() -> None:
    refuses(spectrum, r"the loss, operation '.*' \(aten.linalg_svdvals.default\): got aten.linalg_svdvals")


def test_a_loss_that_branches_on_the_number_of_rows_is_refused() -> None:
    refuses(of_python, r"the loss on values such as '.*' of sizes")


def test_a_loss_with_a_state_is_refused() -> None:
    seen: list[float] = []

    def remembering(outputs: Tensor, batch: Any) -> Tensor:
        seen.append(1.0)
        return entropy(outputs, batch)

    refuses(remembering, "the loss: got seen")


def test_sizes_that_a_trace_has_fixed_are_checked_at_every_call() -> None:
    captured = captured_with(lambda o, b: entropy(o, b) * float(o.shape[1]))
    cut = even_cuts(captured, 1)
    function = rebuilt(decoded(encoded(plain_stage(captured, cut.stages[0]))), CPU, halved=False)
    loss = function.segments[-1]
    values = dict(zip(loss.spec.inputs, (torch.randn(2, 4), torch.tensor([1, 2]), as_tensor(2.0)), strict=True))
    with pytest.raises(JobError, match=r"got sizes \[2, 4\]; expected sizes \['any', 3\]"):
        loss.forward({}, {}, values, RngKey(0, 0))


def test_a_number_of_another_type_than_in_the_first_batch_is_refused() -> None:
    captured = captured_with(scaled)
    plain: Any = Plain(captured, cut := even_cuts(captured, 1))
    one, two = (run(of, cut, {**data(), "scale": 0.5}, weights_of(captured)).loss for of in (captured, plain))
    assert torch.equal(one, two)
    with pytest.raises(JobError, match=r"the loss, value 'batch.scale': got a number of another type"):
        run(plain, cut, {**data(), "scale": 3}, weights_of(captured))


class Own(nn.Module):
    """Does something that may not travel."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) to (rows, 3)."""
        return self.act(self.inner(x))


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda x: torch.linalg.qr(x).Q, "aten.linalg_qr.default"),
        (lambda x: x.as_strided((x.size(0), 3), (3, 1)), "aten.as_strided.default"),
        (lambda x: torch.fft.fft(x).real, "aten.fft_fft.default"),
    ],
)
def test_an_operation_that_may_not_travel_is_named_with_its_module(act: Callable[[Tensor], Tensor], name: str) -> None:
    inner = nn.Sequential(Own(act))
    captured = capture(inner, entropy, data(), lambda batch: ((batch["x"],), {}))
    with pytest.raises(CaptureError, match=rf"operation '.*' \({name}\) of module '0'"):
        plain_stage(captured, even_cuts(captured, 1).stages[0])


def test_compiled_stages_are_refused() -> None:
    captured = captured_with(entropy).compiling("stash")
    with pytest.raises(CaptureError, match="--compile"):
        plain_stage(captured, even_cuts(captured, 1).stages[0])


class Scopes(nn.Module):
    """Graphs in graphs: a branch, a region without gradients, one in full precision, random numbers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=None)  # type: ignore[arg-type]
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.rnn = nn.LSTM(6, 6, 2, dropout=0.3, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) to (rows, 3)."""
        x = self.layers[0](self.norm(x))
        with torch.no_grad():
            scale = x.abs().mean() + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        x = torch.cond(x.sum() > 0, torch.sigmoid, torch.tanh, (x,)) / scale
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layers[1](x)
        y = functional.feature_alpha_dropout(y.float(), 0.2) + x.new_empty(x.shape).bernoulli_(0.5)
        y = self.rnn(self.layers[2](y)[:, None])[0][:, 0]
        result: Tensor = self.last(y + torch.rand_like(y) * y.masked_fill(y > 3, float("-inf")).exp())
        return result


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_graphs_in_graphs_and_every_kind_of_random_number() -> None:
    torch.manual_seed(4)
    captured = capture(Scopes(), entropy, data(), lambda batch: ((batch["x"],), {}))
    params = weights_of(captured)
    targets = {op.target for op in captured.graph.ops}
    assert {"keyed_call", "branch", "cumulative_batch_norm", "wrap_with_autocast", "aten.new_empty.default"} <= targets
    for place in captured.graph.cuts:
        cut = cut_after(captured, [place])
        plain: Any = Plain(captured, cut)
        for halved in (False, True):
            wanted = run(captured, cut, data(5), params, halved=halved)
            assert same(wanted, run(plain, cut, data(5), params, halved=halved)) == [], place
    assert wanted.loss.isfinite()
