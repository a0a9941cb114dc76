"""Stages that have been bytes in between, in the place of a captured model's own; here, or in a process of its own.

``python -m tests.frontend.plain FOLDER`` runs what :func:`asked` has written, without any test's model or loss.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from roundelay.frontend import Captured, Mode, RngKey, StageFunction
from roundelay.frontend.plain_stage import plain_stage, rebuilt
from roundelay.ir.plain_bytes import decoded, encoded
from roundelay.ir.stage import Partition, StageSpec

CPU = torch.device("cpu")


class Plain:
    """A captured model whose stages are rebuilt from bytes."""

    def __init__(self, captured: Captured, cut: Partition) -> None:
        self.captured = captured
        self.data = {spec.stage: encoded(plain_stage(captured, spec)) for spec in cut.stages}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.captured, name)

    def stage(self, spec: StageSpec, device: torch.device = CPU, *, halved: bool = False) -> StageFunction:
        """The functions of a stage."""
        return rebuilt(decoded(self.data[spec.stage]), device, halved=halved)


def tensors(named: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among some values, in memory of their own."""
    return {name: value.detach().clone() for name, value in named.items() if isinstance(value, Tensor)}


def ask(folder: Path, data: bytes, given: dict[str, dict[str, Tensor]]) -> None:
    """Write a stage and what it is called with: ``params``, ``buffers``, ``inputs`` and ``grads``."""
    folder.mkdir(parents=True)
    (folder / "stage").write_bytes(data)
    for name, named in given.items():
        save_file(named, folder / f"{name}.safetensors")


def run_stage(function: StageFunction, given: dict[str, dict[str, Tensor]], mode: Mode = "stash") -> dict[str, Tensor]:
    """Outputs, gradients and buffers of a forward and a backward."""
    buffers = dict(given["buffers"])
    outputs, tape = function.forward(given["params"], buffers, given["inputs"], RngKey(11, 5), mode=mode)
    grads = {name: given["grads"].get(name) for name in function.outputs}
    of_inputs, of_params = function.backward(tape, grads, given["params"])
    of_params |= function.backward_weights(tape.debt)
    parts = {"out": outputs, "grad": of_inputs, "wgrad": of_params, "buffer": buffers}
    return {f"{part} {name}": value for part, named in parts.items() for name, value in tensors(named).items()}


def main() -> None:
    """Run every stage of a folder."""
    torch.set_num_threads(1)
    for folder in sorted(path.parent for path in Path(sys.argv[1]).rglob("stage")):
        given = {name: load_file(folder / f"{name}.safetensors") for name in ("params", "buffers", "inputs", "grads")}
        for halved in (False, True):
            function = rebuilt(decoded((folder / "stage").read_bytes()), CPU, halved=halved)
            save_file(run_stage(function, given), folder / f"found-{halved}.safetensors")
    if found := [name for name in sys.modules if name.startswith(("tests.zoo", "transformers"))]:
        raise SystemExit(f"the person's code was imported: {found}")


if __name__ == "__main__":
    main()
