"""Names of devices, in a plan and as ``--devices`` lists them, one for each worker."""

from __future__ import annotations

import re
from collections.abc import Sequence

from roundelay.errors import PlanError

CPU = "cpu"
DEVICE = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,3})")
"""What a device is called in a plan."""

SHARED = ("cpu", "cuda")
"""Values of ``--devices`` that stand for any number of workers."""


def listed_devices(text: str) -> tuple[str, ...]:
    """The names that are listed, one for each worker; none if the text stands for any number."""
    return () if text in SHARED else tuple(name.strip() for name in text.split(","))


def check_number(names: Sequence[str], num_workers: int, text: str) -> None:
    """Check that there is a device for each worker.

    Raises:
        PlanError: there are more, or fewer.
    """
    if len(names) != num_workers:
        raise PlanError(
            "--devices",
            got=f"{len(names)} devices for {num_workers} workers: {text}",
            expected="cpu, cuda, or one device for each worker, such as cuda:0,cuda:1",
            remedy="Name one for each worker, or change how many there are.",
        )
