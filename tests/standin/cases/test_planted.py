"""Deliberate mistakes with devices, each in a line of the product: a run that holds them is seen to fail."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import roundelay
from roundelay.errors import RoundelayError
from roundelay.frontend import stage_builder
from roundelay.frontend.stages import retarget_device
from roundelay.launching.cuda_handoff import StreamEndpoint
from roundelay.runtime import collectives, predicted_weights
from roundelay.runtime.gradient_bucket import GradientBucket
from roundelay.runtime.optimizer.optimizer_state import OptimizerState
from roundelay.runtime.optimizer.weight_averages import WeightAverages
from roundelay.runtime.stage_state import Stage
from roundelay.transport.cuda import Cuda
from tests.standin.cases.test_losses import job_of
from tests.standin.matrix import Case, bench, plan_of, races_of, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # kernels that a GPU has in no deterministic form

ON_STANDIN = pytest.mark.skipif("tests.standin.device" not in sys.modules, reason="these devices are real")

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def no_races() -> None:
    """Here there are to be some."""


def of_case(line: str, **more: str) -> Callable[[Path], str]:
    """A run of the table, which returns what is wrong with it."""
    return lambda folder: run(Case(line, **more))


def with_own_loss(folder: Path) -> str:
    """A run whose loss makes tensors."""
    found = roundelay.verify(job_of("arange targets"), workers=2, rule="1f1b", steps=3, devices="cuda:0,cuda:0")
    return "" if found.equal else found.differences()


def resumed(folder: Path) -> str:
    """A run that goes on from a checkpoint."""
    place, plan = bench("mlp"), plan_of(Case("1f1b"))
    place.restore()
    saved = folder / "run"
    if not saved.exists():
        roundelay.train(place.job(), plan=plan, steps=2, save_to=saved)
    found = roundelay.verify(place.job(), plan=plan, steps=2, resume=saved)
    return "" if found.equal else found.differences()


def on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def after(owner: Any, name: str, change: Callable[[Any, Any], Any]) -> Plant:
    """Change what a function of the product returns: ``change(first argument, result)``."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **more: change(args[0], real(*args, **more)))

    return plant


def count_on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    """The bucket makes its count where nothing else of it lies."""
    real = GradientBucket.pack

    def pack(self: GradientBucket, *args: Any, **more: Any) -> Any:
        return real(dataclasses.replace(self, device=torch.device("cpu")), *args, **more)

    patch.setattr(GradientBucket, "pack", pack)


def constants_left(patch: pytest.MonkeyPatch) -> None:
    """A stage's constants stay where the model was captured."""
    real = retarget_device._moved

    def moved(value: Any, *args: Any) -> Any:
        return value if isinstance(value, torch.Tensor) else real(value, *args)

    patch.setattr(retarget_device, "_moved", moved)


def views_left(patch: pytest.MonkeyPatch) -> None:
    """A stage asks for views that the layouts of the sample's device allowed."""
    patch.setattr(retarget_device, "_RESHAPED", {})


def messages_left(patch: pytest.MonkeyPatch) -> None:
    """A message's tensors stay on the sender's device."""
    patch.setattr(StreamEndpoint, "_on_own_device", lambda self, value, event: value)


def loss_left(patch: pytest.MonkeyPatch) -> None:
    """The loss makes its tensors on the default device."""
    patch.setattr(stage_builder, "on_device", lambda device, loss: loss)


def optimizer_left(patch: pytest.MonkeyPatch) -> None:
    """An optimizer's state from a checkpoint stays where it was read."""
    real = OptimizerState._restore_one

    def restore(self: OptimizerState, name: str, parameter: Any, flat: dict[str, Any]) -> None:
        real(self, name, parameter, {key: on_cpu(value) for key, value in flat.items()})

    patch.setattr(OptimizerState, "_restore_one", restore)


def _averages(of: WeightAverages, result: None) -> None:
    of.moving = {name: average.cpu() for name, average in of.moving.items()}


def _buffers(of: Stage, result: None) -> None:
    of.buffers = {name: buffer.cpu() for name, buffer in of.buffers.items()}


PLANTED: dict[str, tuple[Plant, Callable[[Path], str]]] = {
    "a bucket's count": (count_on_the_cpu, of_case("1f1b", option="replicas")),
    "a captured constant": (constants_left, of_case("1f1b", model="constants")),
    "a view of another layout": (views_left, of_case("1f1b", model="attention")),
    "a message": (messages_left, of_case("1f1b", place="two")),
    "a message from the CPU": (messages_left, of_case("pipedream", place="mixed")),
    "a loss's tensors": (loss_left, with_own_loss),
    "an optimizer's state": (optimizer_left, resumed),
    "an average": (after(WeightAverages, "__init__", _averages), of_case("1f1b", option="ema")),
    "a buffer": (after(Stage, "__init__", _buffers), of_case("1f1b", model="batchnorm")),
    "a predicted weight": (
        after(predicted_weights, "predict", lambda _, weight: on_cpu(weight)),
        of_case("pipeoptim improved stash"),
    ),
    "an exchange's part": (
        after(collectives, "_cut", lambda _, parts: [tuple(map(on_cpu, of)) for of in parts]),
        of_case("1f1b", option="replicas"),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_with_devices_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, ends = PLANTED[name]
    if name == "a message" and torch.cuda.device_count() < 2:
        pytest.skip("there is one device here")
    assert ends(tmp_path) == ""
    bench.cache_clear()  # stages keep what they have made of a captured model
    plant(monkeypatch)
    try:
        difference = ends(tmp_path)
    except RoundelayError as error:
        assert "two devices" in str(error) or "view size is not compatible" in str(error)  # noqa: PT017
    else:
        assert difference
    finally:
        bench.cache_clear()


def waits_left(patch: pytest.MonkeyPatch) -> None:
    """The receiver of a message does not wait for the sender's work."""
    patch.setattr(StreamEndpoint, "_wait", lambda self, event: None)


def memory_left(patch: pytest.MonkeyPatch) -> None:
    """What another stream reads may be used again while it reads it."""
    patch.setattr(Cuda, "keep", lambda self, tensor, stream: None)


@ON_STANDIN
@pytest.mark.parametrize("plant", [waits_left, memory_left])
def test_a_missing_wait_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("pipeoptim improved stash")
    assert races_of(case) == []
    plant(monkeypatch)
    assert races_of(case)
