"""The plan: the narrow waist between choosing and doing, and the only configuration of a run.

It is a small text file (TOML) that a person reads, edits, diffs and keeps. Every field acts: the run obeys it, or the
simulator reckons with it, or it is refused. Comments explain and are not read.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from roundelay.errors import PlanError, listed

FORMAT = 3

SINCE_1: dict[str, dict[str, Any]] = {
    "Plan": {
        "compile": False,
        "precision": "fp32",
        "loss_scale": "none",
        "clip": "none",
        "read_s": 0.0,
        "recompute": (),
    },
    "StagePlan": {"device": "cpu", "weights_s": 0.0, "owed_bytes": 0},
}
"""Fields that came in while plans had format 1, and what runs did before: plans of that format may lack them."""

SINCE_2: dict[str, dict[str, Any]] = {"Plan": {"ema": 0.0}}
"""Likewise of format 2."""

_ADDED = {1: {kind: SINCE_1[kind] | SINCE_2.get(kind, {}) for kind in SINCE_1}, 2: SINCE_2, FORMAT: {}}

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage; which worker runs it follows from the rule, :func:`roundelay.schedules.workers_of`.

    Args:
        segments: operations that end its segments, in order.
        device: where it runs: ``cpu``, or ``cuda:0`` and so on, as its worker's process numbers them; one and the same
            for all stages of a worker.
        forward_s: predicted seconds of one forward.
        backward_s: predicted seconds of one backward, with modules that it runs again, without a forward that the mode
            ``recompute`` repeats; of its first half where it has two.
        weights_s: predicted seconds of its second half, the weights' gradients; 0 where not measured apart.
        update_s: predicted seconds of one update.
        parameter_bytes: bytes of its weights.
        tape_bytes: bytes that one forward leaves for its backward.
        owed_bytes: bytes that the first half of a backward leaves for the second; 0 where it is whole.
    """

    segments: tuple[str, ...]
    device: str
    forward_s: float
    backward_s: float
    weights_s: float
    update_s: float
    parameter_bytes: int
    tape_bytes: int
    owed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgePlan:
    """What stage ``source`` sends to stage ``target`` with every micro-batch.

    Args:
        source: the earlier stage.
        target: the later stage.
        slots: messages that may be on the way or unread at one time, in each direction.
        forward_bytes: bytes of one message forward.
        backward_bytes: bytes of one message back.
        gradient: whether anything travels back.
    """

    source: int
    target: int
    slots: int
    forward_bytes: int
    backward_bytes: int
    gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All choices of one run.

    Args:
        format: version of this text.
        model: fingerprint of the captured model that it is for.
        rule: update rule.
        predictor: how weights are predicted: ``improved``, ``paper``, ``released-code``, ``partial``; ``none`` if the
            rule does not.
        backward: backward mode: ``stash``, ``recompute`` or ``mixed``.
        recompute: modules that keep their inputs only and are run again by the backward, by names and patterns as
            :mod:`roundelay.lower.recompute_selection` says; ``all`` for every segment.
        compile: whether stages are compiled before they run.
        precision: in which stages compute: ``fp32``, or ``bf16`` or ``fp16`` by torch's autocast, with weights in fp32.
        loss_scale: by what losses are multiplied before the backward, as :mod:`roundelay.ir.loss_scale` says: ``none``,
            ``N``, ``dynamic``, ``dynamic:N`` or ``dynamic:N:COUNT``.
        clip: which gradients are clipped, as :mod:`roundelay.ir.clip` says: ``none``, ``stage:NORM``,
            ``previous:NORM`` or ``global:NORM``.
        ema: decay of the weights' exponential moving average, which is evaluated; 0 for none.
        micro_batches: M, micro-batches of a full batch.
        transport: ``memory`` (threads of one process), ``shm`` (processes that share memory), ``gloo`` (processes) or
            ``nccl`` (processes of a launcher, one CUDA device each).
        deadline_s: seconds after which a silent wait is an error.
        latency_s: predicted seconds of an empty message.
        bytes_per_s: predicted bytes per second of a link.
        read_s: predicted seconds in which the loader gives a micro-batch, beside what is computed; 0 where not known.
        stages: in order.
        edges: ordered by source, then target.
    """

    format: int
    model: str
    rule: str
    predictor: str
    backward: str
    recompute: tuple[str, ...]
    compile: bool
    precision: str
    loss_scale: str
    clip: str
    ema: float
    micro_batches: int
    transport: str
    deadline_s: float
    latency_s: float
    bytes_per_s: float
    read_s: float
    stages: tuple[StagePlan, ...]
    edges: tuple[EdgePlan, ...]

    def __repr__(self) -> str:
        ends = listed([stage.segments[-1] for stage in self.stages if stage.segments])
        return (
            f"Plan(rule={self.rule!r}, stages={self.num_stages}, up to {ends}; micro_batches={self.micro_batches}, "
            f"backward={self.backward!r}, transport={self.transport!r}; print(plan.text()) shows all)"
        )

    @property
    def num_stages(self) -> int:
        """Stages: D, or 2 D where a worker has two."""
        return len(self.stages)

    @property
    def devices(self) -> tuple[str, ...]:
        """Where each stage runs."""
        return tuple(stage.device for stage in self.stages)

    def text(self, comments: Sequence[str] = ()) -> str:
        """As TOML, with ``comments`` on top."""
        lines = [f"# {line}".rstrip() for comment in comments for line in comment.splitlines() or [""]]
        lines += _fields(self, skip=("stages", "edges"))
        for title, parts in (("stages", self.stages), ("edges", self.edges)):
            for part in parts:
                lines += ["", f"[[{title}]]", *_fields(part)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def parse(text: str) -> Plan:
        """The plan that prints as ``text``.

        Raises:
            PlanError: the text is no TOML, of another version, or a field is missing, unknown or of a wrong kind.

        A plan of an earlier format may lack what :data:`SINCE_1` or :data:`SINCE_2` names, and becomes one of this.
        """
        try:
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise _unreadable(str(error)) from error
        if type(table.get("format")) is not int or table["format"] not in _ADDED:
            raise PlanError(
                "format of the plan",
                got=repr(table.get("format")),
                expected=f"{FORMAT}, or a number below, which plans had before",
                remedy="Write a new plan with `roundelay plan JOB.py`; a later Roundelay may have written this one.",
            )
        added = _ADDED[table["format"]]
        table["format"] = FORMAT
        stages = table.pop("stages", None)
        edges = table.pop("edges", [])
        if not isinstance(stages, list) or not stages or not isinstance(edges, list):
            raise _unreadable("no [[stages]]")
        made_stages = tuple(_read(StagePlan, part, f"stages[{i}]", added) for i, part in enumerate(stages))
        made_edges = tuple(_read(EdgePlan, part, f"edges[{i}]", added) for i, part in enumerate(edges))
        return _read(Plan, {**table, "stages": made_stages, "edges": made_edges}, "the plan", added)


def _fields(part: Any, skip: tuple[str, ...] = ()) -> list[str]:
    return [f"{f.name} = {_literal(getattr(part, f.name))}" for f in fields(part) if f.name not in skip]


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_escaped(char) for char in value) + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    return repr(value)


def _escaped(char: str) -> str:
    """As TOML writes it in a basic string: control characters by their number."""
    if char in '"\\':
        return "\\" + char
    return f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char


def _read(kind: type[_Part], table: Any, where: str, added: Mapping[str, dict[str, Any]]) -> _Part:
    """A frozen value from a table, every field present and of its kind; those in ``added`` may be missing."""
    if not isinstance(table, dict):
        raise _unreadable(f"{where} is no table")
    table = added.get(kind.__name__, {}) | table
    known = {f.name: str(f.type) for f in fields(kind)}  # type: ignore[arg-type]
    for name in [*table, *known]:
        if name not in known or name not in table:
            raise PlanError(
                f"{where}: field {name!r}",
                got="an unknown field" if name not in known else "a plan without it",
                expected="each of " + ", ".join(known),
                remedy="Write the plan anew with `roundelay plan JOB.py`, or correct this line.",
            )
    return kind(**{name: _value(known[name], table[name], f"{where}: field {name!r}") for name in known})


def _value(kind: str, value: Any, where: str) -> Any:
    if kind == "float" and type(value) in (int, float) and 0 <= value <= sys.float_info.max:
        return float(value)
    if kind == "int" and type(value) is int and value >= 0:
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "tuple[str, ...]" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if kind.startswith("tuple[") and isinstance(value, tuple):
        return value
    raise PlanError(
        where,
        got=repr(value),
        expected={"float": "a number, not negative", "int": "a whole number, not negative"}.get(kind, kind),
        remedy="Correct the plan, or write a new one with `roundelay plan`.",
    )


def _unreadable(why: str) -> PlanError:
    return PlanError(
        "the plan",
        got=why,
        expected="TOML as `roundelay plan` writes it",
        remedy="Correct the text, or write a new plan with `roundelay plan`.",
    )


NO_EMA = 0.0
"""What a plan says where no average is kept."""

EMA = "roundelay.ema"
"""A parameter's exponential moving average, among the entries of its optimizer state in a snapshot or checkpoint."""

EVALUATED = "roundelay.eval"
"""A parameter as the optimizer's own ``eval()`` makes it (schedule-free optimizers), likewise."""


def check_ema(decay: float) -> None:
    """Refuse a decay that averages nothing.

    Raises:
        PlanError: it is not in [0, 1).
    """
    if not 0.0 <= decay < 1.0:
        raise PlanError(
            "ema of the plan",
            got=f"{decay:g}",
            expected="a decay from 0 (no average) to less than 1, such as 0.999",
            remedy="Correct --ema, Job(ema=...) or the plan.",
        )
