"""The plan: the narrow waist between choosing and doing, and the only configuration of a run.

It is a small text file (TOML) that a person reads, edits, diffs and keeps. Every field acts: the run obeys it, or the
simulator reckons with it, or it is refused. Comments explain and are not read.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import tomli_w

from roundelay.errors import PlanError, counted, listed
from roundelay.ir.clip import Clip
from roundelay.ir.exchange import ExchangePlan, Phase
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.mesh import REPLICAS, SHARDS, Mesh
from roundelay.ir.sbp import Signature
from roundelay.ir.sbp import parse as parse_signature
from roundelay.ir.typed_text import Count, Number, Parsers, convert, toml_line

FORMAT = 13

_SINCE: dict[int, dict[str, Any]] = {
    7: {"deterministic": False},
    8: {"workers": {"threads": 1}},
    9: {"sharded": ["states"]},
    10: {"shards": 0},
    11: {"instruction_s": 0.0, "exchanges": {"seconds": 0.0, "busy_s": 0.0}},
    12: {"workers": {"speed": 1.0}, "edges": {"latency_s": 0.0, "bytes_per_s": 0.0}},
    13: {"stages": {"in_flight": 0}},
}
"""Format to the fields that it has added, with what plans of the format before say by leaving them out; those of a row
of a table under the table's name."""

Lay = tuple[tuple[str, Signature], ...]
"""How a tensor lies on a mesh: axes and signatures; along an axis that is not named each holder has all of it."""

PARSERS: Parsers = {
    Clip: Clip.parse,
    LossScale: LossScale.parse,
    Phase: Phase.parse,
    Signature: parse_signature,
}
"""What stands in a plan as texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker: a process, or a loop that the threads of a process carry on.

    Args:
        name: by which stages say that they run on it.
        device: where it computes: ``cpu``, or ``cuda:0`` and so on, as its process numbers them.
        threads: intra-op threads with which it computes on the CPU.
        speed: how many times as fast as the machine to which the seconds of the stages refer.
    """

    name: str
    device: str
    threads: Count
    speed: Number = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage.

    Args:
        workers: names of the workers that hold it, in order: those of the first replica, one for each place of the
            mesh, then those of the others.
        segments: operations that end its segments, in order.
        forward_s: predicted seconds of one forward.
        backward_s: predicted seconds of one backward, with modules that it runs again, without a forward that the mode
            ``recompute`` repeats; of its first half where it has two.
        weights_s: predicted seconds of its second half, the weights' gradients; 0 where not measured apart.
        update_s: predicted seconds of one update.
        parameter_bytes: bytes of its weights.
        tape_bytes: bytes that one forward leaves for its backward.
        owed_bytes: bytes that the first half of a backward leaves for the second; 0 where it is whole.
        in_flight: forwards that may wait for their backward, where the order is free; 0 where the schedule says it.
    """

    workers: tuple[str, ...]
    segments: tuple[str, ...]
    forward_s: Number
    backward_s: Number
    weights_s: Number
    update_s: Number
    parameter_bytes: Count
    tape_bytes: Count
    owed_bytes: Count
    in_flight: Count = 0


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
        latency_s: predicted seconds of an empty message between these stages.
        bytes_per_s: predicted bytes per second of their link; 0: both are those of the plan.
    """

    source: Count
    target: Count
    slots: Count
    forward_bytes: Count
    backward_bytes: Count
    gradient: bool
    latency_s: Number = 0.0
    bytes_per_s: Number = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All choices of one run.

    Args:
        format: version of this text.
        model: fingerprint of the captured model that it is for.
        rule: update rule.
        layout: how micro-batches and stages lie on workers: ``pipeline``, or a form of cyclic data parallelism
            (:mod:`roundelay.schedules.cyclic`): ``single``, ``dp``, ``mp`` or ``zero``.
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
        deterministic: whether operations must give the same bits whenever they are repeated; one that has no such form
            on its device ends the run.
        replicas: R, replicas of the pipeline, among which the micro-batches of a batch are dealt out.
        micro_batches: M, micro-batches that each replica has of a full batch.
        mesh: axes over which the tensors of a stage lie, and how many workers each has; empty for one worker.
        parameters: signatures of parameters, by name or pattern: pairs of axis and signature
            (:mod:`roundelay.ir.sbp`). What matches nothing is deduced.
        outputs: signatures of what modules and operations return, likewise; a pattern gives them to what can have them.
        states: signatures of parameters' optimizer states, likewise, over ``replicas`` or ``shards``: each updates its
            part and gets the others' (ZeRO-1; OneFlow, Sect. 6.4). What matches nothing is updated by all.
        sharded: what of these parameters is split so: ``states``, ``gradients`` while they are summed (ZeRO-2), and
            ``weights`` between their uses (ZeRO-3).
        shards: S, neighbouring replicas among which it is split, where there are several such groups (hybrid
            sharding); 0: all.
        transport: ``memory`` (threads of one process), ``shm`` (processes that share memory), ``gloo`` (processes),
            ``grpc`` (processes, mutual TLS) or ``nccl`` (processes of a launcher, one CUDA device each).
        deadline_s: seconds after which a silent wait is an error.
        latency_s: predicted seconds of an empty message.
        bytes_per_s: predicted bytes per second of a link.
        instruction_s: predicted seconds of a worker's loop for each instruction, beside what it computes; 0 where not
            known.
        read_s: predicted seconds in which the loader gives a micro-batch, beside what is computed; 0 where not known.
        input_bytes: bytes of a micro-batch's data.
        workers: in the order of their numbers.
        stages: in order.
        edges: ordered by source, then target.
        exchanges: in the order of the stages.
    """

    format: Count
    model: str
    rule: str
    layout: str
    predictor: str
    backward: str
    recompute: tuple[str, ...]
    compile: bool
    precision: str
    loss_scale: LossScale
    clip: Clip
    ema: Number
    deterministic: bool
    replicas: Count
    micro_batches: Count
    mesh: Mapping[str, Count] = field(hash=False)
    parameters: Mapping[str, Lay] = field(hash=False)
    outputs: Mapping[str, Lay] = field(hash=False)
    states: Mapping[str, Lay] = field(hash=False)
    sharded: tuple[str, ...]
    shards: Count
    transport: str
    deadline_s: Number
    latency_s: Number
    bytes_per_s: Number
    instruction_s: Number
    read_s: Number
    input_bytes: Count
    workers: tuple[WorkerPlan, ...]
    stages: tuple[StagePlan, ...]
    edges: tuple[EdgePlan, ...]
    exchanges: tuple[ExchangePlan, ...]

    def __post_init__(self) -> None:
        """Parse what is given as text, so that ``dataclasses.replace(plan, clip="stage:1.0")`` makes a plan too."""
        for name, parse in (("clip", Clip.parse), ("loss_scale", LossScale.parse)):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, parse(value))
        for name in ("parameters", "outputs", "states"):
            if any(isinstance(text, str) for lay in getattr(self, name).values() for _, text in lay):
                object.__setattr__(self, name, {key: _lay(lay) for key, lay in getattr(self, name).items()})

    def __repr__(self) -> str:
        ends = listed([stage.segments[-1] for stage in self.stages if stage.segments])
        return (
            f"Plan(rule={self.rule!r}, stages={self.num_stages}, up to {ends}; micro_batches={self.micro_batches}, "
            f"backward={self.backward!r}, transport={self.transport!r}; print(plan.text()) shows all)"
        )

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.stages)

    @property
    def num_workers(self) -> int:
        """How many workers run them."""
        return len(self.workers)

    @property
    def batch_parts(self) -> int:
        """Into how many micro-batches a full batch is cut, over all replicas."""
        return self.replicas * self.micro_batches

    @property
    def mesh_size(self) -> int:
        """Workers of a stage in one replica."""
        return math.prod(self.mesh.values())

    @property
    def zero(self) -> int:
        """The level of ZeRO: how much of the parameters in ``states`` is split over the replicas."""
        return len(self.sharded) if self.states else 0

    @property
    def grid(self) -> Mesh:
        """The replicas and the mesh as one: which of a stage's holders is which."""
        return Mesh.of(self.replicas, self.mesh, self.shards)

    @property
    def state_axis(self) -> str:
        """The axis over which what is in ``states`` is split."""
        return SHARDS if self.shards else REPLICAS

    def holders(self, stage: int) -> tuple[int, ...]:
        """The numbers of the workers that hold a stage, in the order of the replicas and then of the mesh.

        Raises:
            PlanError: the stage names none, or one that the plan does not have.
        """
        names, known = self.stages[stage].workers, {worker.name: number for number, worker in enumerate(self.workers)}
        if not names or not known.keys() >= set(names):
            raise self.wrong_holders(stage, max(1, len(names)))
        return tuple(known[name] for name in names)

    def wrong_holders(self, stage: int, count: int) -> PlanError:
        """The error for a stage that does not name so many workers of the plan."""
        names, known = self.stages[stage].workers, [worker.name for worker in self.workers]
        each = "one for each replica" if self.mesh_size == 1 else "one for each place of the mesh in each replica"
        return PlanError(
            f"stages[{stage}].workers of the plan",
            got=", ".join(names) or "no name",
            expected=(f"{count} names, {each}, " if count > 1 else "the name of one ")
            + "of its [[workers]]: "
            + ", ".join(known),
            remedy="Correct the plan, or write a new one with `roundelay plan`.",
        )

    def worker_of(self, stage: int, holder: int = 0) -> int:
        """The number of a worker that holds a stage; raises as :meth:`holders`."""
        return self.holders(stage)[holder]

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The numbers of the stages that a worker runs."""
        return tuple(stage for stage in range(self.num_stages) if worker in self.holders(stage))

    def holder_of(self, worker: int) -> int:
        """Which of the holders of its stages a worker is, as :attr:`grid` numbers them."""
        return next((self.holders(stage).index(worker) for stage in self.stages_of(worker)), 0)

    @property
    def worker_stages(self) -> tuple[tuple[int, ...], ...]:
        """For each worker the numbers of the stages that it runs."""
        holders = [self.holders(stage) for stage in range(self.num_stages)]
        return tuple([tuple([k for k, own in enumerate(holders) if w in own]) for w in range(self.num_workers)])

    @property
    def devices(self) -> tuple[str, ...]:
        """Where each worker computes."""
        return tuple(worker.device for worker in self.workers)

    def told(self, worker: int) -> str:
        """A worker's number; its name and speed where that is not 1."""
        own = self.workers[worker]
        return str(worker) if own.speed == 1.0 else f"{own.name} (speed {own.speed:g})"

    def device_of(self, stage: int) -> str:
        """Where a stage of the first replica computes."""
        return self.workers[self.worker_of(stage)].device

    def threads_of(self, stage: int) -> int:
        """With how many intra-op threads each holder of a stage computes on the CPU."""
        return self.workers[self.worker_of(stage)].threads

    @property
    def arrangement(self) -> str:
        """Its workers in words: ``2 workers``, or ``2 replicas x 2 stages x tensor 2 x ZeRO 1``."""
        axes = [f"{axis} {size}" for axis, size in self.mesh.items() if size > 1]
        if self.replicas == 1 and not axes:
            return counted(self.num_workers, "worker")
        each = self.num_workers // self.grid.size
        parts = [f"{count} {name}" for count, name in ((self.replicas, "replicas"), (each, "stages")) if count > 1]
        split = f"ZeRO {self.zero}" + (f" in groups of {self.shards}" if self.shards else "")
        return " x ".join([*parts, *axes, *([split] if self.zero else [])])

    @property
    def threads(self) -> int:
        """The most intra-op threads with which a worker computes on the CPU; 1 where none does."""
        return max((worker.threads for worker in self.workers if worker.device == "cpu"), default=1)

    @property
    def leader_threads(self) -> int:
        """The intra-op threads of the first worker on the CPU, whose process leads: with them it does all else."""
        return next((worker.threads for worker in self.workers if worker.device == "cpu"), 1)

    def text(self, comments: Sequence[str] = ()) -> str:
        """As TOML, with ``comments`` on top."""
        lines = [f"# {line}".rstrip() for comment in comments for line in comment.splitlines() or [""]]
        parts: dict[str, tuple[Any, ...]] = {name: getattr(self, name) for name in _TABLES}
        signatures = {name: getattr(self, name) for name in ("parameters", "outputs", "states")}
        apart = {*parts, *(name for name, given in signatures.items() if given)}
        lines += [toml_line(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in apart]
        for title, given in signatures.items():
            if given:
                lines += ["", f"[{title}]", *(toml_line(_quoted(name), pairs) for name, pairs in given.items())]
        for title, rows in parts.items():
            for row in rows:
                lines += ["", f"[[{title}]]", *(toml_line(f.name, getattr(row, f.name)) for f in fields(row))]
        return "\n".join(lines) + "\n"

    @staticmethod
    def parse(text: str) -> Plan:
        """The plan that prints as ``text``.

        Raises:
            PlanError: the text is no TOML or of another format, or a field is missing, unknown or of a wrong type.
        """
        try:
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise _unreadable(str(error)) from error
        _upgrade(table)
        if type(table.get("format")) is not int or table["format"] != FORMAT:
            raise PlanError(
                "format of the plan",
                got=repr(table.get("format")),
                expected=f"{FORMAT}; plans of earlier formats do not say which layout they have",
                remedy="Write a new plan with `roundelay plan JOB.py`; a later Roundelay may have written this one.",
            )
        for kind, where, part in _parts(table):
            known = [field.name for field in fields(kind)]
            for name in [*part, *known]:
                if name not in known or name not in part:
                    raise PlanError(
                        f"{where}: field {name!r}",
                        got="an unknown field" if name not in known else "a plan without it",
                        expected="each of " + ", ".join(known),
                        remedy="Write a new plan with `roundelay plan JOB.py`, or correct this line.",
                    )
        try:
            return convert(table, Plan, PARSERS)
        except msgspec.ValidationError as error:
            raise _wrong_value(table, str(error)) from error


def _lay(pairs: Lay) -> Lay:
    """Pairs of axes and signatures, of which some are texts."""
    return tuple([(axis, parse_signature(str(signature))) for axis, signature in pairs])


def _upgrade(table: dict[str, Any]) -> None:
    """Make of a plan of an earlier format one of this, where all that it leaves out has a value that it had."""
    while type(given := table.get("format")) is int and (added := _SINCE.get(given + 1)):
        own = {name: value for name, value in added.items() if name not in _TABLES}
        rows = [(row, new) for name, new in added.items() if name in _TABLES for row in _rows(table, name)]
        if own.keys() & table.keys() or any(new.keys() & row.keys() for row, new in rows):
            return
        table |= {"format": given + 1, **own}
        for row, new in rows:
            row |= new


def _rows(table: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of a table of the plan, as far as it has any."""
    rows = table.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


_TABLES: dict[str, type] = {"workers": WorkerPlan, "stages": StagePlan, "edges": EdgePlan, "exchanges": ExchangePlan}


def _quoted(text: str) -> str:
    """A text as a string of TOML, which may stand for a key too."""
    return tomli_w.dumps({"x": text}).rstrip("\n").removeprefix("x = ")


def _parts(table: dict[str, Any]) -> list[tuple[type, str, dict[str, Any]]]:
    """The tables that make up a plan, each with its type and what people call it."""
    parts: list[tuple[type, str, Any]] = [(Plan, "the plan", table)]
    for name, kind in _TABLES.items():
        rows = table.setdefault(name, [])
        if not isinstance(rows, list) or not (rows or kind in (EdgePlan, ExchangePlan)):
            raise _unreadable(f"no [[{name}]]")
        parts += [(kind, f"{name}[{i}]", row) for i, row in enumerate(rows)]
    for _, where, part in parts:
        if not isinstance(part, dict):
            raise _unreadable(f"{where} is no table")
    return parts


_WRONG = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?")


def _wrong_value(table: dict[str, Any], message: str) -> PlanError:
    """The error for what msgspec has found: ``Expected `int`, got `str` - at `$.stages[0].tape_bytes```."""
    expected, path = _WRONG.fullmatch(message).groups()  # type: ignore[union-attr]
    value: Any = table
    for step in re.findall(r"\w+", path or ""):
        value = value[int(step)] if isinstance(value, list) else value[step]
    place, field = re.fullmatch(r"(?:(\w+\[\d+\])\.)?(\w+).*", path or "").groups()  # type: ignore[union-attr]
    return PlanError(
        f"{place or 'the plan'}: field {field!r}",
        got=repr(value),
        expected=expected.removeprefix("Expected ").partition(", got")[0].replace("`", ""),
        remedy="Correct the plan, or write a new one with `roundelay plan`.",
    )


def _unreadable(why: str) -> PlanError:
    return PlanError(
        "the plan",
        got=why,
        expected="TOML as `roundelay plan` writes it",
        remedy="Correct the text, or write a new plan with `roundelay plan`.",
    )
