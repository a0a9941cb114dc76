"""Starts autograd at import, without device threads, so that forked processes can run a backward.

The first backward of a process starts autograd's threads, one for each device of every accelerator that torch knows at
that moment; later devices get none. If there are such threads, a process forked afterwards raises "Unable to handle
autograd's threading in combination with fork-based multiprocessing" at its own first backward. torch's CUDA build, the
one on PyPI for Linux, counts a placeholder device where there is no GPU, but only after the first ``torch.export``. So
where there is no accelerator, importing this module runs a backward of one element: no device threads are started from
then on, and the process can be forked at any time. See docs/design/0012-autograd-and-fork.md.
"""

from __future__ import annotations

import warnings

import torch


def has_accelerator() -> bool:
    """Whether torch can compute on a device other than the CPU; does not initialize CUDA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about an unsuitable driver, which `roundelay doctor` reports
        if torch.cuda.device_count() > 0:
            return True
        kind = torch.accelerator.current_accelerator(check_available=False)
        return kind is not None and kind.type != "cuda" and torch.accelerator.is_available()


def one_backward() -> None:
    """Run a backward of one element."""
    torch.ones((), requires_grad=True).neg().backward()


def autograd_anew() -> None:
    """In a forked child, let autograd make its engine anew: two threads that first need it at once would both free it.

    Torch (``PythonEngine::get_python_engine``) looks for a fork without a lock, whenever an operation saves a tensor.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), requires_grad=True, device="cpu").exp()


def _started_without_devices() -> bool:
    if has_accelerator():
        return False
    with torch.inference_mode(False), torch.enable_grad():
        one_backward()
    return True


STARTED_WITHOUT_DEVICES = _started_without_devices()
"""Whether autograd was started here while there was no accelerator, so that no backward starts device threads."""
