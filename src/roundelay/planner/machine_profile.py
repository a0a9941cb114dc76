"""A machine's profile, as ``roundelay calibrate`` measures it: what messages, exchanges, instructions, operators cost.

It is a text file (TOML) that a person can read, keep and compare. Planning reckons with it; nothing below a plan does.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from roundelay.errors import PlanError, counted
from roundelay.ir.exchange import Phase
from roundelay.ir.typed_text import Count, Number, Size, toml_line
from roundelay.planner.cost_curve import Curve, between, fitted_line

FORMAT = 1

MESSAGE = "message"
"""The kind of a link's cost that is of messages from one worker to another."""

SHARED = "shared-all-reduce"
"""The kind of a sum of weights' gradients in memory that the workers share; without such memory it is an all-reduce."""

_END = "# the end\n"
"""Without it a text may be a part of one."""

_NOTHING = Curve(((0, 0.0),))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """What messages, or exchanges of one kind, cost.

    Args:
        kind: ``message``, ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all`` or :data:`SHARED`.
        group: how many workers take part: the first ones; of messages the first and the last.
        seconds: from start to end, by the bytes of the message, or of the whole tensor that is exchanged.
        cpu: CPU seconds that it takes of each worker that takes part.
    """

    kind: str
    group: Size
    seconds: Curve
    cpu: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCosts:
    """What operators of one class cost a worker that computes alone.

    Args:
        kind: the class; of a backward with ``-backward`` at its end.
        unit: of its sizes: ``FLOPs``, or ``bytes`` that it reads and writes; of a backward those of its forward, of an
            optimizer's step those of its weights.
        seconds: by size.
    """

    kind: str
    unit: str
    seconds: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """What a planner must know of the machine on which a plan would run.

    Args:
        format: version of this text.
        made: when it was measured, as an ISO time with its offset.
        processor: the CPU's model.
        cores: those that could be used, of a host.
        torch: version of torch.
        memory_bytes: memory of a host.
        hosts: number of hosts.
        transport: how messages traveled.
        workers: how many there were.
        threads: intra-op threads of each.
        instruction_s: seconds of a worker's loop from the end of one instruction to the start of the next.
        message_instruction_s: the same after an instruction that gives a small message.
        segment_s: seconds of a segment of a stage, forward and backward together, beside its operators.
        box_s: seconds of the two instructions of an exchange, beside the exchange itself.
        together: how many times as long operators take when all workers compute at once: products of large matrices
            (``matmul``), elementwise operators on large tensors (``elementwise``), and ``small`` ones.
        links: by kind and group; none with one worker.
        operators: by class; among them a ``copy`` of memory, and a ``call`` that has next to nothing to compute.
    """

    format: Count
    made: Annotated[datetime, msgspec.Meta(tz=True)]
    processor: str
    cores: Size
    torch: str
    memory_bytes: Count
    hosts: Size
    transport: str
    workers: Size
    threads: Size
    instruction_s: Number
    message_instruction_s: Number
    segment_s: Number
    box_s: Number
    together: Mapping[str, Number] = field(hash=False)
    links: tuple[LinkCosts, ...]
    operators: tuple[OperatorCosts, ...]

    def message_s(self, num_bytes: float) -> float:
        """Seconds until a message of so many bytes has arrived, at the worker that is farthest away."""
        return self._link(MESSAGE, num_bytes, 2, "seconds")

    def message_cpu_s(self, num_bytes: float) -> float:
        """CPU seconds that it takes of its sender, and as many of its receiver."""
        return self._link(MESSAGE, num_bytes, 2, "cpu")

    def exchange_s(self, phases: Sequence[Phase], num_bytes: float, group: int, *, shared: bool = False) -> float:
        """Seconds of an exchange; between groups that were measured, linear in the logarithm of their size.

        Args:
            phases: of the exchange; without any, as where sums are handed on by messages, 0.
            num_bytes: of all its tensors (:attr:`roundelay.ir.exchange.ExchangePlan.num_bytes`).
            group: how many workers take part.
            shared: whether it sums gradients of weights, for which workers of one host may share memory.

        Raises:
            PlanError: nothing of its kind was measured.
        """
        return sum(self._link(kind, num_bytes, group, "seconds") for kind in self._kinds(phases, shared))

    def exchange_cpu_s(self, phases: Sequence[Phase], num_bytes: float, group: int, *, shared: bool = False) -> float:
        """CPU seconds that it takes of each worker; arguments and errors as of :meth:`exchange_s`."""
        return sum(self._link(kind, num_bytes, group, "cpu") for kind in self._kinds(phases, shared))

    def operator_s(self, kind: str, size: float) -> float:
        """Seconds of an operator of a class.

        Raises:
            PlanError: none was measured.
        """
        for row in self.operators:
            if row.kind == kind:
                return row.seconds(size)
        raise self._unmeasured(f"operators: {kind}", {row.kind: None for row in self.operators})

    def _kinds(self, phases: Sequence[Phase], shared: bool) -> list[str]:
        """The collectives that an exchange consists of."""
        kinds = [str(phase).partition("(")[0].removesuffix("-max") for phase in phases]
        if kinds != ["reduce-scatter", "all-gather"]:
            return kinds
        return [SHARED if shared and any(row.kind == SHARED for row in self.links) else "all-reduce"]

    def _link(self, kind: str, num_bytes: float, group: int, what: Literal["seconds", "cpu"]) -> float:
        rows = sorted((row.group, getattr(row, what)(num_bytes)) for row in self.links if row.kind == kind)
        if not rows:
            raise self._unmeasured(f"links: {kind}", {row.kind: None for row in self.links})
        return between([(math.log2(size), cost) for size, cost in rows], math.log2(group)) if group > 1 else 0.0

    def _unmeasured(self, what: str, known: Mapping[str, None]) -> PlanError:
        got = f"none with {counted(self.workers, 'worker')} over {self.transport}"
        expected = f"one of {', '.join(known)}" if known else "a profile of as many workers as are planned"
        return bad_profile(f": {what}", got, expected)

    def single_line(self) -> MachineProfile:
        """With one latency α and one time per byte β for every message and exchange, as AutoDDL has them (Sect. 3.2).

        They are fitted by least squares to all exchanges together, each by the formula of a ring (Table 2). CPU seconds
        stay as they are.
        """
        terms = [(row, *_RING[row.kind](row.group)) for row in self.links]
        points = [(a, b * n, s) for row, a, b in terms if row.kind != MESSAGE for n, s in row.seconds.points if s > 0]
        alpha, beta = fitted_line(points)
        lines = [Curve(((0, a * alpha), (1 << 20, a * alpha + b * beta * (1 << 20)))) for _, a, b in terms]
        links = [replace(row, seconds=line) for (row, _, _), line in zip(terms, lines, strict=True)]
        return replace(self, links=tuple(links))

    def without_cpu(self) -> MachineProfile:
        """As if messages and exchanges took no CPU time of workers."""
        return replace(self, links=tuple([replace(row, cpu=_NOTHING) for row in self.links]))

    def age(self, now: datetime) -> str:
        """How long ago it was measured, in words: ``3 days``."""
        seconds = (now - self.made).total_seconds()
        for name, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
            if seconds >= length:
                return counted(int(seconds // length), name)
        return "less than a minute"

    def check_machine(self, here: Mapping[str, Any]) -> None:
        """Refuse a profile of another machine.

        Args:
            here: ``processor``, ``cores`` and ``torch`` of this one.

        Raises:
            PlanError: one of them differs.
        """
        if other := [name for name, value in here.items() if getattr(self, name) != value]:
            found, own = ([f"{name} {of[name]}" for name in other] for of in (asdict(self), here))
            raise bad_profile("", ", ".join(found), f"{', '.join(own)}, as this machine has")

    def text(self) -> str:
        """As TOML."""
        lines: list[str] = []
        for name, value in asdict(self).items():
            if isinstance(value, tuple):
                for row in value:
                    lines += ["", f"[[{name}]]", *map(toml_line, row, row.values())]
            elif isinstance(value, dict):
                lines += ["", f"[{name}]", *map(toml_line, value, value.values())]
            else:
                lines.append(toml_line(name, value.isoformat() if isinstance(value, datetime) else value))
        return "\n".join([*lines, "", _END])

    @staticmethod
    def parse(text: str) -> MachineProfile:
        """The profile that prints as ``text``.

        Raises:
            PlanError: the text is no TOML, no profile or one of another format, or a field is missing or of a wrong
                type.
        """
        try:
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise bad_profile("", str(error), "TOML as `roundelay calibrate` writes it") from error
        if not text.endswith(_END) or not table.keys() <= {one.name for one in fields(MachineProfile)}:
            raise bad_profile("", "another file, or a part of one", "one that `roundelay calibrate` has written")
        if table.get("format") != FORMAT:
            raise bad_profile(": field 'format'", repr(table.get("format")), str(FORMAT))
        try:
            return msgspec.convert({"links": [], **table}, MachineProfile)
        except msgspec.ValidationError as error:
            raise bad_profile("", str(error), "each field with a value of its kind") from error


_RING: dict[str, Callable[[int], tuple[float, float]]] = {
    MESSAGE: lambda p: (1, 1),
    "all-reduce": lambda p: (2 * (p - 1), 2 * (p - 1) / p),
    SHARED: lambda p: (2 * (p - 1), 2 * (p - 1) / p),
    "all-gather": lambda p: (p - 1, (p - 1) / p),
    "reduce-scatter": lambda p: (p - 1, (p - 1) / p),
    "all-to-all": lambda p: (p - 1, (p - 1) / p**2),
}
"""By kind, from p workers to how often a ring pays α, and β for each byte of the whole tensor; a worker of an
all-to-all has a p-th of it."""


def bad_profile(part: str, got: str, expected: str) -> PlanError:
    """The error for a profile, or a part of it, that cannot be used."""
    remedy = "Measure this machine with `roundelay calibrate`."
    return PlanError(f"the machine's profile{part}", got=got, expected=expected, remedy=remedy)
