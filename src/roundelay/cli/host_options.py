"""Options of ``roundelay host`` and ``roundelay join``. No torch is needed."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from roundelay.cli import options as o
from roundelay.errors import UsageError
from roundelay.ir.rule import BUILT_IN
from roundelay.planner.plan_options import Choices
from roundelay.trust.invitation import is_host

LOOPBACK = "127.0.0.1"

RULE = "ravnest"
"""The default: no machine waits for another's turn."""

_NOT_HOSTED = frozenset(
    {
        *("workers", "stages", "transport", "devices", "layout", "data_parallel", "tensor_parallel", "signatures"),
        *("zero", "hybrid", "cluster", "compile"),
    }
)

HostedChoices = Annotated[
    Choices,
    o.Shown(
        hidden=_NOT_HOSTED,
        helps={
            "micro_batches": "Micro-batches per batch, M. [default: 1; as many as --peers for pipedream-2bw, cdp-v1, "
            "cdp-v2, rehearse; twice as many for rules that flush, where a batch's loss is the mean of its parts']",
            "clip": "Clip gradients: stage:NORM, each stage by its own norm; of rules with an order also "
            "previous:NORM, by all gradients' norm of an earlier batch; of rules that flush also global:NORM, of the "
            "same batch. [default: none]",
            "deterministic": "Compute by deterministic algorithms of torch alone; slower. Refused where torch cannot.",
            "threads": "Intra-op threads of each machine. [default: as many as plain PyTorch has there]",
            "rule": f"Update rule: {', '.join(BUILT_IN)}. [default: {RULE}]",
        },
    ),
]
"""Choices where one machine hosts and others join: one worker for each machine, on its CPU, over grpc."""

Listen = Annotated[
    str | None,
    typer.Option(
        help="Address, or ADDRESS:PORT, of this machine on which it listens; one TCP port is all that a firewall must "
        "let in. [default: 127.0.0.1, which nobody outside of this machine reaches]",
        metavar="A[:P]",
        show_default=False,
    ),
]


Advertise = Annotated[
    str | None,
    typer.Option(
        help="Address or name, or ADDRESS:PORT, at which the others reach this machine, where that is another one: of "
        "a router that passes the port on. [default: where it listens]",
        metavar="A[:P]",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Options of ``host`` other than its plan's choices, one for each field."""

    peers: Annotated[
        int, typer.Option(help="Machines that train, this one included.", min=2, max=64, show_default=False)
    ]
    listen: Listen = None
    advertise: Advertise = None
    wait_s: Annotated[
        float, typer.Option(help="Seconds in which all must have joined; then their invitations expire.", min=1)
    ] = 3600.0
    steps: o.Steps = None
    epochs: o.Epochs = None
    seed: o.Seed = 0
    resume: o.Resume = None
    out: Annotated[Path | None, typer.Option(help="The run's folder. [default: runs/TIME]")] = None
    checkpoint_every: Annotated[
        int,
        typer.Option(
            help="Also write a checkpoint every S updates. [default: only after epochs]",
            min=0,
            metavar="S",
            show_default=False,
        ),
    ] = 0
    check: o.Check = None
    verbose: Annotated[bool, typer.Option("--verbose", help="At the end also show time and memory by machine.")] = False

    def of_run(self) -> o.RunOptions:
        """Those that ``train`` has too."""
        return o.RunOptions(
            steps=self.steps,
            epochs=self.epochs,
            seed=self.seed,
            resume=self.resume,
            out=self.out,
            checkpoint_every=self.checkpoint_every,
            check=self.check,
            verbose=self.verbose,
        )


def address_of(listen: str | None) -> tuple[str, int]:
    """The address and the port to listen on; port 0 is any free one.

    Raises:
        UsageError: it is no address of one machine.
    """
    host, port = _parts(LOOPBACK if listen is None else listen.strip())
    try:
        number = ipaddress.ip_address(host)
        if port.isdecimal() and int(port) < 2**16 and is_host(str(number)):
            return host, int(port)
    except ValueError:
        pass
    raise UsageError(
        "--listen",
        got=repr(listen),
        expected="an address of this machine at which the others reach it, such as 192.168.1.20 or 192.168.1.20:7700",
        remedy="`ip -brief address` shows the addresses of this machine.",
    )


def advertised_of(text: str | None) -> tuple[str, int] | None:
    """The address or name, and the port, 0 for that on which this machine listens, where others reach it.

    Raises:
        UsageError: it is neither.
    """
    if text is None:
        return None
    host, port = _parts(text.strip())
    if port.isdecimal() and int(port) < 2**16 and is_host(host):
        return host, int(port)
    raise UsageError(
        "--advertise",
        got=repr(text),
        expected="an address or a name at which the others reach this machine, such as 203.0.113.7:7700 or "
        "pc.example.org",
        remedy="Give that of the router that passes the port on to this machine; leave it out if there is none.",
    )


def _parts(text: str) -> tuple[str, str]:
    """Host and port of a text; 0 if it has none."""
    host, colon, port = (text, "", "0") if text.count(":") > 1 and not text.startswith("[") else text.rpartition(":")
    host, port = (host, port) if colon else (text, "0")
    return host.removeprefix("[").removesuffix("]"), port


def check_hosted(choices: Choices) -> None:
    """Refuse choices that mean nothing where one machine hosts and others join.

    Raises:
        UsageError: naming the first.
    """
    given = sorted(choices.names() & _NOT_HOSTED)
    if given:
        name = f"--{given[0].replace('_', '-')}"
        raise UsageError(
            f"{name} with `roundelay host`",
            got="both",
            expected="one worker for each machine, on its CPU, over grpc",
            remedy=f"Leave {name} out; --peers says how many machines there are.",
        )
