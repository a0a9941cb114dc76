"""Checks of bits: one worker against plain PyTorch, runs against their reference, a run against itself."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import roundelay
from benchmarks.gpu.first_look import networks, told
from benchmarks.gpu.first_look.place import Place
from roundelay import Job, RoundelayError

ROOT = Path(__file__).parents[3]
STEPS = 4
TWO_STAGES = ("interleaved-1f1b", "zb-v")
"""Rules that give every worker two stages."""

OTHERS = ("torchvision", "transformers")
"""Packages that a machine may lack; the cases that need them are skipped."""

NEAR = 5e-3
"""How far attention may be from plain PyTorch where its backward adds in any order; else no bit may differ."""


@dataclass(frozen=True)
class Case:
    """A job that is verified.

    Args:
        name: of the case.
        make: makes the job.
        workers: devices that it takes, all of them the same.
        options: of `roundelay.plan`.
        steps: updates.
        devices: in place of `workers` times the same one.
        tamper: how the run is broken on purpose; then `verify` must find a difference.
        refused: a regular expression for the refusal that must come.
    """

    name: str
    make: Callable[[], Job]
    workers: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    devices: str = ""
    tamper: str | None = None
    refused: str | None = None


def of(name: str, network: str, place: Place, num_devices: int = 2, /, **options: Any) -> Case:
    """A case of one of the networks here, on two workers unless the options say otherwise."""
    parts = {key: options.pop(key) for key in ("steps", "devices", "tamper") if key in options}
    if "layout" not in options:
        options = {"workers": 2, "rule": "pipeoptim"} | options
    return Case(name, lambda: networks.made(network, place.tiny), num_devices, options, **parts)


def many(place: Place, cases: Sequence[Case]) -> None:
    """Verify one case after the other in this process, and tell of each."""
    warnings.filterwarnings("ignore")
    told.cases(len(cases))
    for case in cases:
        told.begins(case.name)
        state, words, fidelity = _verified(place, case)
        told.case(case.name, state, words, fidelity)
        if "CUDA error" in words:
            told.fails("the device's context is lost: no further cases in this process")
            break


def _verified(place: Place, case: Case) -> tuple[str, str, str]:
    """(state, what is odd, whether the captured job was compared with plain PyTorch)."""
    try:
        job = case.make()
        if case.refused is not None:
            roundelay.train(job, steps=case.steps, devices=place.names(case.workers), **case.options)
            return "odd", "trained, and should have been refused", ""
        chosen = roundelay.plan(job, devices=case.devices or place.names(case.workers), **case.options)
        result = roundelay.verify(job, plan=chosen, steps=case.steps, tamper=case.tamper)
    except RoundelayError as error:
        return _refused(case, error)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in OTHERS:
            return "skipped", f"{error.name} is not here", ""
        return "odd", told.in_words(error), ""
    if case.tamper is not None:
        return ("found", "", "") if result.difference else ("odd", "the fault on purpose was not found", "")
    fidelity = result.fidelity
    compared = "none" if fidelity is None else fidelity.unchecked or ("equal" if fidelity.equal else "differs")
    return ("equal", "", compared) if result.equal else ("odd", "DIFFERENT " + result.differences(), compared)


def _refused(case: Case, error: RoundelayError) -> tuple[str, str, str]:
    if case.refused is not None and re.search(case.refused, str(error)):
        return "refused", "", ""
    return "odd", f"exit code {error.exit_code}: {error}", ""


def rules(place: Place) -> None:
    """Every rule, and every layout of the cyclic ones."""
    names = ("1f1b", "pipeoptim", "pipedream", "gpipe", "zb-h1", "pipedream-2bw", "spectrain", *TWO_STAGES)
    cases = [of(rule, "mlp", place, rule=rule) for rule in names]
    for layout in ("single", "dp", "mp", "zero"):
        for rule in ("cdp-v1", "cdp-v2"):
            workers = {"single": 1, "mp": 3}.get(layout, 2)
            cases.append(of(f"{layout} {rule}", "mlp", place, workers, layout=layout, rule=rule, micro_batches=2))
    many(place, [cases[i] for i in (0, 1, 9, 12)] if place.tiny else cases)


def nets(place: Place) -> None:
    """Networks of several kinds, and losses that make tensors."""
    names = [
        "cnn",
        "attention",
        "loss makes weights",
        "loss makes labels",
        "encoder",
        "embedding",
        "lstm",
        "dropout",
        "resnet18",
        "attention with dropout",
        "host read",
    ]
    cases = [of(name, name, place) for name in (names[:4] if place.tiny else names)]
    many(place, cases)


def options(place: Place) -> None:
    """Precisions, clipping, averages, recomputing, replicas, meshes, mixed devices, and a fault on purpose."""
    flush = {"rule": "1f1b"}
    alone = {"workers": 1, **flush}
    mixed = f"cpu,{place.names(1)}"
    cases = [
        of("bf16", "mlp", place, precision="bf16", **flush),
        of("clip global", "mlp", place, clip="global:1.0", **flush),
        of("tamper stash", "mlp", place, rule="pipedream", tamper="stash", steps=8),
        of("recompute", "attention", place, recompute=["all"], **flush),
        of("data-parallel 2", "mlp", place, 4, data_parallel=2, **flush),
        of("zero 1", "mlp", place, data_parallel=2, zero=1, **alone),
        of("zero 3, pipeoptim", "mlp", place, 4, data_parallel=2, zero=3, rule="pipeoptim"),
        of("hybrid 2x2", "mlp", place, 4, hybrid="2x2", **alone),
        of("zero 3, bf16, attention", "attention", place, data_parallel=2, zero=3, precision="bf16", **alone),
        of("tensor-parallel 2", "mlp", place, tensor_parallel=2, **alone),
        of("tensor-parallel 2, attention", "attention", place, tensor_parallel=2, **alone),
        of("cpu and device", "mlp on cpu and device", place, devices=mixed, **flush),
        of("fp16", "mlp", place, precision="fp16", loss_scale="dynamic:1073741824:3", steps=10, **flush),
        of("clip stage", "mlp", place, clip="stage:1.0"),
        of("ema", "mlp", place, ema=0.9),
        of("bf16 cnn", "cnn", place, precision="bf16", **flush),
        of("bf16 attention", "attention", place, precision="bf16", **flush),
        of("bf16 resnet18", "resnet18", place, precision="bf16", **flush),
        of("tamper drop-update", "mlp", place, tamper="drop-update", steps=8),
    ]
    many(place, cases[:6:2] if place.tiny else cases)


def zoo(place: Place) -> None:
    """The models of the tests, and of an example."""
    many(place, list(_zoo_cases(place)))


def _zoo_cases(place: Place) -> Iterator[Case]:
    models = importlib.import_module("tests.zoo").MODELS
    for i, (name, entry) in enumerate(models.items()):
        if place.tiny and name not in ("mlp", "tied_head"):
            continue
        rule = {"rule": "1f1b", "micro_batches": 2} if i % 3 == 2 else {"rule": "pipeoptim"}
        yield Case(name, lambda entry=entry: _zoo_job(entry), 2, {"workers": 2, **rule})
    if not place.tiny:
        yield Case("char_gpt", _char_gpt, 2, {"workers": 2, "rule": "pipeoptim"})
        yield Case(
            "gpt2 of 2 layers", lambda: networks.gpt_job(2, 4, 256, words=5_000), 2, {"workers": 2, "rule": "1f1b"}
        )


def _zoo_job(entry: Any) -> Job:
    networks.seed()
    data = entry.batches(0, STEPS)
    return Job(
        model=entry.build(0),
        loss=entry.loss,
        batches=lambda epoch: data,
        inputs=entry.inputs,
        optimizer=networks.adamw,
    )


def _char_gpt() -> Job:
    networks.seed()
    path = ROOT / "examples" / "char_gpt.py"
    spec = importlib.util.spec_from_file_location("first_look_char_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.job(0)


def programs(place: Place, part: int, of_parts: int) -> None:
    """Programs of strangers: those that train are verified, those that are refused are refused in the same words."""
    for module in ("buffers", "calls", "habits", "losses", "results", "states", "weights"):  # they fill the table
        importlib.import_module(f"tests.programs.{module}")
    table = importlib.import_module("tests.programs.table").PROGRAMS
    fresh = importlib.import_module("tests.programs.plain").fresh
    known = sorted(name for name, one in table.items() if not one.draws)
    chosen = known[part::of_parts]
    chosen = chosen[:: len(chosen) // 4] if place.tiny else chosen
    options = {"workers": 2, "rule": "1f1b", "micro_batches": 1}
    many(
        place,
        [
            Case(name, lambda name=name: fresh(table[name].make), 2, options, refused=one.refused)
            for name, one in table.items()
            if name in chosen
        ],
    )


def one_worker(place: Place) -> None:
    """One worker, M = 1, against plain PyTorch on the same device: the greatest difference of the weights."""
    warnings.filterwarnings("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    for network in ("mlp", "cnn", "attention", "resnet18"):
        if package := networks.missing(network):
            told.note(f"{network} left out: {package} is not here")
            continue
        for precision in ("fp32",) if place.tiny and network != "mlp" else ("fp32", "bf16"):
            with told.part(f"{network} {precision}"):
                far = _from_plain(place, network, precision)
                told.figure(f"{network} {precision}", far, "of a weight")
                most = NEAR if place.cuda and network == "attention" else 0.0
                told.bar(far <= most, f"{network} {precision} {far:.1e}")


def _from_plain(place: Place, network: str, precision: str) -> float:
    plain = networks.made(network, place.tiny)
    model = plain.model.to(place.device).train()
    optimizer = plain.optimizer(list(model.named_parameters()))
    for batch in plain.batches(0):
        here = tuple(tensor.to(place.device) for tensor in batch)
        with torch.autocast(place.kind, torch.bfloat16, enabled=precision == "bf16"):
            loss = plain.loss(model(*here[:-1]), here)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    place.wait()
    ours = networks.made(network, place.tiny)
    chosen = roundelay.plan(ours, workers=1, rule="1f1b", micro_batches=1, devices=place.names(1), precision=precision)
    roundelay.train(ours, plan=chosen, steps=len(list(plain.batches(0))), check="off")
    return farthest(list(model.parameters()), list(ours.model.parameters()))


def farthest(one: Sequence[Tensor], two: Sequence[Tensor]) -> float:
    """The greatest difference between tensors; infinite where one is not a number."""
    far = 0.0
    for a, b in zip(one, two, strict=True):
        difference = (a.detach().cpu().double() - b.detach().cpu().double()).abs().max().item()
        far = max(far, difference if difference == difference else float("inf"))
    return far


def twice(place: Place) -> None:
    """The same training twice: the greatest difference of the weights, with and without `deterministic=True`."""
    warnings.filterwarnings("ignore")
    with told.part("without deterministic"):
        far = _apart(place, {})
        told.figure("without deterministic", far, "of a weight")
        if not place.cuda:
            told.bar(far == 0.0, f"without deterministic {far:.1e}")
    with told.part("with deterministic"):
        try:
            far = _apart(place, {"deterministic": True})
        except TypeError as error:
            told.note(f"with deterministic: skipped, {error}")
            return
        told.figure("with deterministic", far, "of a weight")
        told.bar(far == 0.0, f"with deterministic {far:.1e}")


def _apart(place: Place, choices: dict[str, Any]) -> float:
    weights = []
    for _ in range(2):
        job = networks.made("attention", place.tiny)
        roundelay.train(
            job,
            workers=2,
            rule="pipeoptim",
            devices=place.names(2),
            steps=4 if place.tiny else 12,
            check="off",
            **choices,
        )
        weights.append([parameter.detach().cpu().clone() for parameter in job.model.parameters()])
    return farthest(*weights)
