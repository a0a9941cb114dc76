"""Measure the operations of a model on a micro-batch: their seconds, kept for the next plan, and what they save."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from roundelay.env import cache_folder, malloc_settings
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch, replace
from roundelay.ir.device_names import CPU
from roundelay.ir.graph import WEIGHT, Profile
from roundelay.observe.profile_cache import keep, kept, machine, place
from roundelay.planner.kept_bytes import SavedStorages
from roundelay.planning.op_profiler import measure_operations
from roundelay.planning.piece_profiler import measure_pieces
from roundelay.planning.torch_scope import in_child, on_threads, user_code


def profiled(captured: Captured, micro_batch: Batch, threads: int, device: str = CPU) -> tuple[Profile, str]:
    """Return a profile of every operation on one micro-batch, cached or new, and its origin in words.

    Args:
        captured: the model.
        micro_batch: of the size that will be trained on.
        threads: intra-op threads with which it will be computed.
        device: where.

    Raises:
        UserCodeError: the model or the loss raised.
    """
    where = torch.device(device)
    with on_threads(threads), user_code("measuring the operations on the first micro-batch"):
        values = captured.values(micro_batch)
        key = {
            "model": captured.graph.fingerprint,
            "tensors": {name: [str(tensor.dtype), *tensor.shape] for name, tensor in values.items()},
            "precision": captured.precision,
            "torch": torch.__version__,
            "threads": threads,
            "device": device if device == CPU else torch.cuda.get_device_name(where),
            "malloc": malloc_settings(),
            **machine(),
        }
        folder, length = cache_folder(), len(captured.graph.ops) + 1
        path = None if folder is None else place(folder, key)
        cached = None if path is None else kept(path, key, length)
        if cached is not None:
            return cached, f"measured on this machine at an earlier plan ({path})"
        if device == CPU:
            profile = in_child(lambda: measure_operations(captured, micro_batch), "measuring the operations", Profile)
        else:
            profile = measure_pieces(captured, micro_batch, where)
    if path is not None and keep(path, key, profile):
        return profile, f"measured on this machine now, and kept for the next plan ({path})"
    why = "nothing is to be kept" if path is None else f"{path} cannot be written"
    return profile, f"measured on this machine now; {why}, so the next plan may be cut elsewhere"


def saved_storages(captured: Captured, micro_batch: Batch) -> SavedStorages:
    """Run the model forward, operation by operation, and note the storages that the backward of each reads."""
    found, own = _Saved(captured), replace(micro_batch, lambda _, leaf: leaf.clone())  # it may be a view of the batch
    captured.walk(own, found.run)
    for name, tensor in captured.values(own).items():
        found.value(name, tensor)
    return SavedStorages(tuple(found.num_bytes), tuple(map(tuple, found.saved)), found.values, found.views)


class _Saved:
    """The storages of a run, by number. All stay alive, so that no address is used twice."""

    def __init__(self, captured: Captured) -> None:
        graph = captured.graph
        self.ops, self.saved = graph.ops, [dict[int, None]() for _ in range(len(graph.ops) + 1)]
        self.num_bytes = [weight.num_bytes for weight in graph.parameters.values()]  # a stage that gets one has a copy
        self.values = {WEIGHT + name: i for i, name in enumerate(graph.parameters)}
        self.views: dict[str, int] = {}
        self.weights = {weight.untyped_storage()._cdata for weight in captured.parameters().values()}
        self.numbers: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []

    def run(self, i: int, call: Callable[[], Any]) -> Any:
        """Run an operation, as :meth:`~roundelay.frontend.Captured.walk` has it run."""
        with torch.autograd.graph.saved_tensors_hooks(partial(self._save, i), lambda tensor: tensor):
            output = call()
        if i == len(self.ops):
            self.saved[i] |= {self._number(root.detach()): None for root in output if root.requires_grad}
        elif isinstance(output, torch.Tensor):
            self.value(self.ops[i].name, output.detach())
        return output

    def _save(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.layout == torch.strided and tensor.untyped_storage()._cdata not in self.weights:
            self.saved[i][self._number(tensor)] = None
        return tensor

    def value(self, name: str, tensor: torch.Tensor) -> None:
        """Note the storage of a value; if it is not contiguous, another stage gets a copy."""
        plain = tensor.layout == torch.strided
        if plain and tensor.is_contiguous():
            self.values[name] = self._number(tensor)
            return
        if plain:
            self.views[name] = self._number(tensor)
        self.values[name] = len(self.num_bytes)
        self.num_bytes.append(tensor.numel() * tensor.element_size())

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            self.numbers[storage._cdata] = len(self.num_bytes)
            self.num_bytes.append(storage.nbytes())
            self.alive.append(tensor)
        return self.numbers[storage._cdata]
