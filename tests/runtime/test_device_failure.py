from __future__ import annotations

import os

import pytest
import torch

import roundelay
from roundelay.launching.forked_call import isolated
from roundelay.runtime.processes import device_failure
from roundelay.runtime.processes.device_failure import RecentIntegers, device_error, has_failed
from roundelay.runtime.processes.user_errors import unexpected
from tests.api.jobs import make, mlp

FULL = (
    "CUDA out of memory. Tried to allocate 2.38 GiB. GPU 1 has a total capacity of 139.80 GiB of which 137.31 GiB is "
    "free. 1.40 GiB allowed; Of the allocated memory 12.50 MiB is allocated by PyTorch, and 1.50 MiB is reserved ..."
)
ASSERTED = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some ..."


def test_a_lack_of_memory_names_device_and_bytes_and_what_to_try() -> None:
    told = unexpected("stage 1, forward of micro-batch 3 on cuda:1", torch.OutOfMemoryError(FULL))
    assert type(told).__name__ == "DeviceError"
    assert told.got == (
        "out of memory on cuda:1: 2.38 GiB more were asked for, where 137.31 GiB of 139.80 GiB are free and 1.40 GiB "
        "allowed"
    )
    for way in ("--micro-batches", "--recompute", "--zero", "--workers"):
        assert way in told.remedy


@pytest.fixture
def recent(monkeypatch: pytest.MonkeyPatch) -> RecentIntegers:
    monkeypatch.setattr(device_failure, "_lost", [])
    kept = RecentIntegers(roundelay.capture(make(mlp())).graph)  # of three classes
    kept.note(6, {"batch.1": torch.tensor([0, 2, 1]), "input.0": torch.zeros(3)})
    kept.note(7, {"batch.1": torch.tensor([0, 14, 1]), "input.0": torch.zeros(3)})
    kept.note(8, {"input.0": torch.tensor([[5, 900]])})
    return kept


def test_a_wrong_label_is_told_with_the_micro_batch_s_labels(recent: RecentIntegers) -> None:
    told = device_error("stage 1, forward of micro-batch 7", torch.AcceleratorError(ASSERTED), recent.wrong(7))
    assert told is not None
    assert told.got == "labels outside of 0..2: batch field '1' has integers from 0 to 14"
    assert "cannot use the device any more" in told.remedy
    assert has_failed()


def test_so_are_indices_of_which_the_limit_is_not_known(recent: RecentIntegers) -> None:
    assert recent.wrong(8) == "an index outside of its range: input '0' has integers from 5 to 900"
    assert recent.wrong(6).startswith("an index outside")
    assert not recent.wrong(99)


def test_another_failure_of_the_device_is_told_as_one(recent: RecentIntegers) -> None:
    told = device_error("stage 0", torch.AcceleratorError("CUDA error: unspecified launch failure\nmore"))
    assert told is not None
    assert told.got == "CUDA error: unspecified launch failure"
    assert device_error("stage 0", RuntimeError(ASSERTED)) is None


def test_a_forked_child_of_a_process_that_uses_cuda_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's optimizers ask a GPU for its stream where they see one, and in such a child that raises."""
    parent = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != parent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))

    def seen() -> list[bool]:
        return [torch.cuda.is_available(), torch.accelerator.current_accelerator(check_available=True) is not None]

    assert isolated(seen, "looking for a GPU") == [False, False]
    assert seen() == [True, True]
