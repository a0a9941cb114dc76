"""``python -m tests.standin -m tests.standin.launched train JOB.py --transport nccl``: processes with a stand-in each.

In place of NCCL, which needs devices, lanes go over gloo; all else is what `roundelay train` does on a host with GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from roundelay.cli import main, own_processes
from roundelay.launching import rendezvous
from roundelay.transport.nccl_p2p import Wait
from tests.transport.harness import PATIENCE_S, GlooLane


@final
class DeviceLane(GlooLane):
    """A lane for tensors of a device, which travel as copies on the host.

    Args:
        store: where the two sides meet.
        sends: whether this side is the sender.
    """

    def __init__(self, store: Any, sends: bool) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=PATIENCE_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group: Any = dist.ProcessGroupGloo(store, 0 if sends else 1, 2, options)
        self._held: list[dist.Work] = []
        self._copies: list[torch.Tensor] = []

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Send copies, which are kept as long as the lane."""
        copies = [part.cpu() for part in parts]
        self._copies += copies
        super().send(copies)

    def post(self, parts: Sequence[torch.Tensor]) -> Wait:
        """Receive on the host; whoever waits gets it copied to the device."""
        copies = [torch.empty_like(part, device="cpu") for part in parts]
        arrived = super().post(copies)

        def wait() -> None:
            arrived()
            for part, copy in zip(parts, copies, strict=True):
                part.copy_(copy)

        return wait


if __name__ == "__main__":
    own_processes.ENTRY = ("-m", "tests.standin", "-m", "tests.standin.launched")
    rendezvous.NcclLane = DeviceLane  # type: ignore[misc, assignment]
    main()
