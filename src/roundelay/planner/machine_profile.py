"""A machine's profile, as ``roundelay calibrate`` measures it: what messages, exchanges, instructions, operators cost.

It is a text file (TOML) that a person can read, keep and compare. Planning reckons with it; nothing below a plan does.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from roundelay.errors import PlanError, counted
from roundelay.ir.exchange import Phase
from roundelay.ir.typed_text import Count, Number, Size, convert, toml_line
from roundelay.planner.cost_curve import NOTHING, Curve, between, fitted_line

FORMAT = 1

REMEDY = "Measure this machine with `roundelay calibrate`."

SHARED = "shared-all-reduce"
"""The kind of a sum of weights' gradients in memory that the workers share; without such memory it is an all-reduce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCosts:
    """What messages from one worker to another cost, the one that is farthest away.

    Args:
        seconds: until a message has arrived, by its bytes.
        cpu: CPU seconds that it takes of its sender, and as many of its receiver.
    """

    seconds: Curve
    cpu: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCosts:
    """What exchanges of one kind cost.

    Args:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all`` or :data:`SHARED`.
        group: how many workers take part, neighbours.
        seconds: from its start to its end, by the bytes of the whole tensor.
        cpu: CPU seconds that it takes of each of them.
    """

    kind: str
    group: Size
    seconds: Curve
    cpu: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCosts:
    """What operators of one class cost a worker that computes alone.

    Args:
        kind: the class.
        unit: of its sizes: ``FLOPs``, or ``bytes`` that it reads and writes.
        forward: seconds of its forward by its size; of an optimizer, of its step.
        backward: seconds of its backward, by the size of its forward.
    """

    kind: str
    unit: str
    forward: Curve
    backward: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A host's memory.

    Args:
        bytes: how many it has.
        copy: seconds of a copy by its bytes.
    """

    bytes: Count
    copy: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """What a planner must know of the machine on which a plan would run.

    Args:
        format: version of this text.
        made: when it was measured, as an ISO time in UTC.
        processor: the CPU's model.
        cores: those that could be used, of a host.
        torch: version of torch.
        hosts: number of hosts.
        transport: how messages traveled.
        workers: how many there were.
        threads: intra-op threads of each.
        call_s: seconds of a call of an operator that has next to nothing to compute.
        instruction_s: seconds of a worker's loop from the end of one instruction to the start of the next.
        message_instruction_s: the same after an instruction that gives a small message.
        segment_s: seconds of a segment of a stage, forward and backward together, beside its operations.
        box_s: seconds of the two instructions of an exchange, beside the exchange itself.
        together: how many times as long an operator takes when all workers compute at once, by its class.
        messages: what messages cost.
        exchanges: by kind and group; none with one worker.
        operators: by class.
        memory: of each host.
    """

    format: Count
    made: str
    processor: str
    cores: Size
    torch: str
    hosts: Size
    transport: str
    workers: Size
    threads: Size
    call_s: Number
    instruction_s: Number
    message_instruction_s: Number
    segment_s: Number
    box_s: Number
    together: Mapping[str, Number] = field(hash=False)
    messages: MessageCosts
    exchanges: tuple[ExchangeCosts, ...]
    operators: tuple[OperatorCosts, ...]
    memory: Memory

    def message_s(self, num_bytes: float) -> float:
        """Seconds until a message of so many bytes has arrived."""
        return self.messages.seconds(num_bytes)

    def message_cpu_s(self, num_bytes: float) -> float:
        """CPU seconds that it takes of its sender, and of its receiver."""
        return self.messages.cpu(num_bytes)

    def exchange_s(self, phases: Sequence[Phase], num_bytes: float, group: int, *, shared: bool = False) -> float:
        """Seconds of an exchange.

        Args:
            phases: of the exchange; without any, as where sums are handed on by messages, 0.
            num_bytes: of all its tensors (:attr:`roundelay.ir.exchange.ExchangePlan.num_bytes`).
            group: how many workers take part.
            shared: whether it sums gradients of weights, for which workers of one host may share memory.

        Raises:
            PlanError: nothing of its kind was measured.
        """
        return self._exchange(phases, num_bytes, group, shared, cpu=False)

    def exchange_cpu_s(self, phases: Sequence[Phase], num_bytes: float, group: int, *, shared: bool = False) -> float:
        """CPU seconds that it takes of each of them; arguments and errors as of :meth:`exchange_s`."""
        return self._exchange(phases, num_bytes, group, shared, cpu=True)

    def _exchange(self, phases: Sequence[Phase], num_bytes: float, group: int, shared: bool, *, cpu: bool) -> float:
        if group == 1:
            return 0.0
        total = 0.0
        for kind in kinds_of(phases):
            rows = self._rows(kind, shared)
            points = [(math.log2(row.group), (row.cpu if cpu else row.seconds)(num_bytes)) for row in rows]
            total += between(points, math.log2(group))
        return total

    def _rows(self, kind: str, shared: bool) -> list[ExchangeCosts]:
        """What was measured of a kind, by group."""
        names = (SHARED, kind) if shared and kind == "all-reduce" else (kind,)
        for name in names:
            if rows := [row for row in self.exchanges if row.kind == name]:
                return sorted(rows, key=lambda row: row.group)
        raise PlanError(
            f"the machine's profile: {kind} exchanges",
            got=f"none, as it was measured with {counted(self.workers, 'worker')}",
            expected="a profile measured with as many workers as the plan has",
            remedy="Measure with `roundelay calibrate --workers N`.",
        )

    def operator(self, kind: str) -> OperatorCosts:
        """What operators of a class cost.

        Raises:
            PlanError: none was measured.
        """
        for row in self.operators:
            if row.kind == kind:
                return row
        known = ", ".join(row.kind for row in self.operators)
        raise PlanError("the machine's profile: operators", got=repr(kind), expected=f"one of {known}", remedy=REMEDY)

    def single_line(self) -> MachineProfile:
        """With one latency α and one time per byte β for every message and exchange, as AutoDDL has them (Sect. 3.2).

        They are fitted by least squares to all exchanges together, each by the formula of a ring (Table 2). CPU seconds
        stay as they are.
        """
        if not self.exchanges:
            return self
        rows = [(row, *_RING[row.kind](row.group)) for row in self.exchanges]
        alpha, beta = fitted_line([(a, b * size, s) for row, a, b in rows for size, s in row.seconds.points if s > 0])
        exchanges = tuple([replace(row, seconds=_line(a * alpha, b * beta)) for row, a, b in rows])
        return replace(self, messages=replace(self.messages, seconds=_line(alpha, beta)), exchanges=exchanges)

    def without_cpu(self) -> MachineProfile:
        """As if messages and exchanges took no CPU time of workers."""
        exchanges = tuple([replace(row, cpu=NOTHING) for row in self.exchanges])
        return replace(self, messages=replace(self.messages, cpu=NOTHING), exchanges=exchanges)

    def age(self, now: datetime) -> str:
        """How long ago it was made, in words: ``3 days``."""
        seconds = (now - datetime.fromisoformat(self.made)).total_seconds()
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
            raise PlanError(
                "the machine's profile",
                got=", ".join(f"{name} {getattr(self, name)}" for name in other),
                expected=", ".join(f"{name} {here[name]}" for name in other) + ", as this machine has",
                remedy=REMEDY,
            )

    def text(self) -> str:
        """As TOML."""
        lines: list[str] = []
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, tuple):
                for row in value:
                    lines += ["", f"[[{one.name}]]", *_lines(row)]
            elif isinstance(value, str | int | float):
                lines.append(toml_line(one.name, value))
            else:
                lines += ["", f"[{one.name}]", *_lines(value)]
        return "\n".join(lines) + "\n"

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
            raise _bad("", str(error), "TOML as `roundelay calibrate` writes it") from error
        known = {one.name for one in fields(MachineProfile)}
        if type(table.get("format")) is not int or not table.keys() <= known:
            raise _bad("", "another file", "one that `roundelay calibrate` has written")
        if table["format"] != FORMAT:
            raise _bad("format of ", str(table["format"]), str(FORMAT))
        try:
            profile = convert({"exchanges": [], **table}, MachineProfile, {Curve: Curve.parse})
            datetime.fromisoformat(profile.made).astimezone(UTC)
        except (msgspec.ValidationError, ValueError) as error:
            raise _bad("", str(error), "each field with a value of its kind") from error
        return profile


def _lines(table: Any) -> list[str]:
    """A table as lines of TOML."""
    own = table if isinstance(table, Mapping) else {one.name: getattr(table, one.name) for one in fields(table)}
    return [toml_line(name, value) for name, value in own.items()]


def kinds_of(phases: Sequence[Phase]) -> list[str]:
    """The collectives that an exchange consists of."""
    kinds = [str(phase).partition("(")[0].removesuffix("-max") for phase in phases]
    return ["all-reduce"] if kinds == ["reduce-scatter", "all-gather"] else kinds


_RING = {
    "all-reduce": lambda p: (2 * (p - 1), 2 * (p - 1) / p),
    SHARED: lambda p: (2 * (p - 1), 2 * (p - 1) / p),
    "all-gather": lambda p: (p - 1, (p - 1) / p),
    "reduce-scatter": lambda p: (p - 1, (p - 1) / p),
    "all-to-all": lambda p: (p - 1, (p - 1) / p**2),
}
"""By kind, from p workers to how often its ring pays α, and β for each byte of the whole tensor; a worker of an
all-to-all has a p-th of it."""


def _line(alpha: float, beta: float) -> Curve:
    return Curve(((0, alpha), (1 << 20, alpha + beta * (1 << 20))))


def _bad(part: str, got: str, expected: str) -> PlanError:
    return PlanError(f"{part}the machine's profile", got=got, expected=expected, remedy=REMEDY)
