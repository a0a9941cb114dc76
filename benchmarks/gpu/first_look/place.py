"""Where the checks compute: a CUDA device, or the CPU in a rehearsal; its clock and its memory."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch

MIB = 1 << 20


@dataclass(frozen=True)
class Place:
    """A kind of device.

    Args:
        kind: ``cuda`` or ``cpu``.
        tiny: whether sizes are those of a rehearsal.
    """

    kind: str
    tiny: bool

    @property
    def cuda(self) -> bool:
        """Whether it is a CUDA device."""
        return self.kind == "cuda"

    @property
    def device(self) -> torch.device:
        """The device as torch knows it."""
        return torch.device("cuda", 0) if self.cuda else torch.device("cpu")

    def names(self, count: int) -> str:
        """``--devices`` for so many workers on this one device."""
        return ",".join(["cuda:0" if self.cuda else "cpu"] * count)

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.cuda:
            torch.cuda.synchronize()

    def now(self) -> float:
        """Seconds, when the device has done everything."""
        self.wait()
        return time.perf_counter()

    def collect(self) -> None:
        """Give back the memory that nothing uses any more."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        else:
            ctypes.CDLL(None).malloc_trim(0)

    def allocated(self) -> float:
        """MiB in use: of tensors on the device; on the CPU of the whole process."""
        if self.cuda:
            return torch.cuda.memory_allocated() / MIB
        return _status("VmRSS")

    def reserved(self) -> float:
        """MiB that torch holds of the device."""
        return torch.cuda.memory_reserved() / MIB if self.cuda else _status("VmRSS")

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> float:
        """MiB at most in use since then."""
        return torch.cuda.max_memory_allocated() / MIB if self.cuda else _status("VmHWM")


def _status(name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0
