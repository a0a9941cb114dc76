"""The table of transports: what a plan's ``transport`` may be, and what planning and launching must know of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roundelay.errors import PlanError, did_you_mean
from roundelay.optional_packages import check_installed


@dataclass(frozen=True, slots=True)
class Transport:
    """One way for messages to travel between workers.

    Args:
        name: as plans and the command line call it.
        summary: what it is, for help texts.
        workers: what the workers are: threads of one process, processes forked by it, or processes that a launcher such
            as torchrun starts.
        devices: device types whose tensors it carries.
        latency_s: seconds of an empty message between two workers of one host, for planning.
        bytes_per_s: bandwidth between two workers of one host, for planning.
        packages: optional modules that it needs.
    """

    name: str
    summary: str
    workers: Literal["threads", "forked", "launched"]
    devices: tuple[str, ...]
    latency_s: float
    bytes_per_s: float
    packages: tuple[str, ...] = ()

    @property
    def forks(self) -> bool:
        """Whether its workers are forked processes: these cannot use CUDA once their parent has."""
        return self.workers == "forked"


TRANSPORTS = {
    transport.name: transport
    for transport in (
        Transport("memory", "threads of one process", "threads", ("cpu", "cuda"), 2e-5, 1e11),
        Transport("shm", "processes, shared memory", "forked", ("cpu",), 1e-4, 2.5e9),
        Transport("gloo", "processes", "forked", ("cpu",), 4e-4, 1.5e9),
        Transport("grpc", "processes, mutual TLS", "forked", ("cpu",), 5e-4, 4e8, ("grpc", "cryptography")),
        Transport("nccl", "torchrun", "launched", ("cuda",), 4e-4, 2e10),
    )
}
"""By name. nccl's latency is gloo's, which carries its frames; its bandwidth is an assumption (a PCIe 4.0 slot). The
other figures are measured."""


def transport_named(name: str) -> Transport:
    """Return the transport called `name`.

    Raises:
        PlanError: there is none.
    """
    if name not in TRANSPORTS:
        raise PlanError(
            "transport of the plan",
            got=repr(name),
            expected=f"one of {', '.join(TRANSPORTS)}: what carries the messages",
            remedy=did_you_mean(name, TRANSPORTS) + "Correct the plan or the option.",
        )
    return TRANSPORTS[name]


def check_packages(name: str) -> None:
    """Check that what the transport called `name` needs is installed; nothing is imported.

    Raises:
        PlanError: there is no such transport.
        UsageError: a package is missing.
    """
    modules = transport_named(name).packages
    check_installed(modules, f"transport {name}", "roundelay[join]", ", or choose another transport.")
