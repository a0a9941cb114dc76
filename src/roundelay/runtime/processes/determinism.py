"""Computing so that the same bits come whenever it is repeated, and naming the operation with which they cannot.

On the CPU, with one intra-op thread, they always come. With several they come from all operations but a few that add
into a tensor by index (the backward of ``weights[indices]``), which torch computes in order if it is asked to. A GPU's
kernels add in any order unless torch is asked for others. Where torch has none it raises (``strict``), or warns. Its
fused attentions are exact on a GPU when it raises and not when it warns, so after an error they are left out: attention
is then computed by matrix products.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from roundelay.env import set_default
from roundelay.errors import NondeterministicError
from roundelay.ir.device_names import CPU

WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""What the environment must say, before CUDA is first used, for its matrix products to be exact: 32 MiB a stream."""

_NONE = re.compile(r"(?P<operation>\S+) does not have a deterministic implementation")
_CUBLAS = re.compile(r"not deterministic because it uses CuBLAS")


def set_workspace() -> None:
    """Set :data:`WORKSPACE`, unless the environment has it: torch reads it once."""
    set_default(*WORKSPACE)


set_workspace()


def uses_device(devices: Sequence[str]) -> bool:
    """Whether one of these computes otherwise than the CPU does."""
    return any(name != CPU for name in devices)


def use_threads(count: int) -> None:
    """Let the calling thread compute with so many intra-op threads: OpenMP has a number for each thread."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


@contextmanager
def deterministic(wanted: bool = True, *, strict: bool = True, threads: int = 1) -> Iterator[None]:
    """A context in which operations give the same bits whenever they are repeated.

    Args:
        wanted: False for what the CPU needs alone: nothing on one thread.
        strict: raise where torch has no such form of an operation; else compute it as it comes.
        threads: most intra-op threads with which the CPU computes.
    """
    if not wanted and threads == 1:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    of_torch: Any = torch.utils.deterministic
    benchmark, filled = torch.backends.cudnn.benchmark, of_torch.fill_uninitialized_memory
    fused = _fused_attentions()
    asked_strictly = before == (True, False)  # by a context around this one, which stays so
    lenient = not strict if wanted else not asked_strictly
    torch.use_deterministic_algorithms(True, warn_only=lenient)
    torch.backends.cudnn.benchmark, of_torch.fill_uninitialized_memory = False, False
    if wanted and not strict:
        _use_attentions((False,) * len(fused))
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark, of_torch.fill_uninitialized_memory = benchmark, filled
        _use_attentions(fused)


def _fused_attentions() -> tuple[bool, ...]:
    backends = torch.backends.cuda
    return backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.cudnn_sdp_enabled()


def _use_attentions(enabled: Sequence[bool]) -> None:
    backends = torch.backends.cuda
    for enable, value in zip(
        (backends.enable_flash_sdp, backends.enable_mem_efficient_sdp, backends.enable_cudnn_sdp), enabled, strict=True
    ):
        enable(value)


def nondeterministic(subject: str, error: BaseException) -> NondeterministicError | None:
    """Describe torch's error for an operation that gives other bits at each call; None if ``error`` is another one."""
    if not isinstance(error, RuntimeError):
        return None
    if _CUBLAS.search(str(error)):
        return NondeterministicError(
            subject,
            got="a matrix product, in a process that used CUDA before Roundelay was imported",
            expected=f"{'='.join(WORKSPACE)} in the environment, which CUDA reads once",
            remedy="Set it before Python starts, or import roundelay first.",
        )
    found = _NONE.search(str(error))
    if found is None:
        return None
    return NondeterministicError(
        subject,
        got=f"{found['operation']}, which gives other bits at each call here",
        expected="operations that torch has in a deterministic form, as `deterministic` asks for",
        remedy="Leave --deterministic out, or compute it in another way.",
    )
