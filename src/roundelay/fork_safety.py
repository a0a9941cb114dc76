"""Autograd before any fork: torch allows no backward in a process forked from one in which autograd has device threads.

The first backward of a process starts autograd's threads, one for each device of every accelerator that torch knows at
that moment, once and for all. A process that is forked afterwards raises "Unable to handle autograd's threading in
combination with fork-based multiprocessing" at its own first backward. torch's CUDA build, which PyPI serves for Linux,
counts a stand-in device where there is no GPU, but only after the first ``torch.export``. So where there is no
accelerator this module, when it is imported, runs one backward of one element: from then on there are no device
threads, whatever is registered later, and this process can be forked at any time. See
docs/design/0012-autograd-and-fork.md.
"""

from __future__ import annotations

import warnings

import torch


def has_accelerator() -> bool:
    """Whether torch could compute on something else than the CPU here. Asking does not start CUDA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that does not fit; `roundelay doctor` reports it
        if torch.cuda.device_count() > 0:
            return True
        kind = torch.accelerator.current_accelerator(check_available=False)
        return kind is not None and kind.type != "cuda" and torch.accelerator.is_available()


def one_backward() -> None:
    """Run a backward of one element."""
    torch.ones((), requires_grad=True).neg().backward()


def _started_without_devices() -> bool:
    if has_accelerator():
        return False
    with torch.inference_mode(False), torch.enable_grad():
        one_backward()
    return True


STARTED_WITHOUT_DEVICES = _started_without_devices()
"""Whether a backward in this process starts no device threads: they were started, when there was no accelerator."""
