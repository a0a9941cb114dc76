"""What a machine that has joined is assigned: its stages, plan, optimizer and state as data, and a task made of them.

Nothing of it is Python, and nothing is believed that the machine does not check: the plan is read and checked as a file
would be, operations are those of a list, and memory is what the machine allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NoReturn, TypeVar, final

import msgspec
import torch
from msgspec import Meta
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from roundelay.checkpoint import held_state
from roundelay.checkpoint.held_state import HeldState, StateTable
from roundelay.checkpoint.shards import Shard, whole_ranges
from roundelay.errors import JobError, PlanError, RoundelayError, UsageError
from roundelay.frontend.plain_model import PlainModel, module_of
from roundelay.frontend.plain_stage import plain_stage
from roundelay.ir import plain_bytes
from roundelay.ir.graph import Graph, Parameter
from roundelay.ir.plan import Plan
from roundelay.ir.rule import BUILT_IN
from roundelay.ir.stage import Edge, Partition, StageSpec
from roundelay.ir.value_layout import ValueLayout
from roundelay.job import Job
from roundelay.launching.peer_group import Place
from roundelay.lower.emit import emit
from roundelay.lower.reading import Reading
from roundelay.lower.validate_plan import check_plan
from roundelay.lower.work import works_of
from roundelay.membership.roster import NAME
from roundelay.runtime.initial_state import Initial
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.runtime.optimizer import plain_optimizer as optimizers
from roundelay.runtime.optimizer.optimizer_state import WHOLE
from roundelay.runtime.optimizer.stage_optimizer import without_gradients
from roundelay.runtime.state_reports import StateUse
from roundelay.runtime.worker import Task
from roundelay.session.training import Session
from roundelay.trust.authority import Credentials

ASSIGNMENT, STATE = "assignment", "state"
"""Names under which the host leaves these for a machine."""

READY = "ready"
"""Name under which a machine says that it takes part, or why it does not."""

MOST_BYTES = 2**26
"""Of an assignment without its state."""

MOST_STAGES, MOST_MICRO_BATCHES = 1024, 2**16
"""Of a plan that a machine believes."""

_T = TypeVar("_T")
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Name = Annotated[str, Meta(pattern=f"^{NAME}$")]


@final
class Assigned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of a machine.

    Args:
        spec: which part of the graph it is, and what it sends and receives.
        plain: the stage (:func:`roundelay.ir.plain_bytes.encoded`).
        parameters: what is said of its parameters, by name.
        state: of the stage, without its tensors.
        strides: of tensors that do not lie in the order of their dimensions, by name.
        layouts: what is known of the values that it receives and sends, by name.
    """

    spec: StageSpec
    plain: bytes
    parameters: dict[str, Parameter]
    state: StateTable
    strides: dict[str, tuple[_Count, ...]]
    layouts: dict[str, ValueLayout]


@final
class Assignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a machine is assigned.

    Args:
        plan: text of the plan.
        worker: number of the machine's.
        names: of the machines of all workers.
        seed: of the run.
        start_g: first micro-batch.
        updates: made before.
        optimizer: the optimizer (:func:`roundelay.runtime.optimizer.plain_optimizer.encoded`).
        stages: of the worker.
        inputs: values that enter the model.
        batch: values of the batch that the loss reads.
        metrics: values that the loss returns beside the loss.
        loss_counts: whether the loss returns a sum and a count.
        labels_per_row: where it is a mean over labels; else 0.
        generation: of the run.
    """

    plan: str
    worker: _Count
    names: tuple[_Name, ...]
    seed: int
    start_g: _Count
    updates: _Count
    optimizer: bytes
    stages: tuple[Assigned, ...]
    inputs: tuple[str, ...]
    batch: tuple[str, ...]
    metrics: tuple[str, ...]
    loss_counts: bool
    labels_per_row: float
    generation: _Count


LEAST_SILENT_MS, MOST_SILENT_MS = 1500, 60_000
"""Within these a ping's answer must come: no launcher watches the machines."""

QUEUED_BYTES = 6 * 2**20
"""What may lie before a ping: a piece of a message, the kernel's buffer, a router's."""

_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Assignment)


def check_travels(session: Session) -> None:
    """Refuse, before anybody joins, what cannot travel as data.

    Raises:
        PlanError, CaptureError, JobError: naming it.
    """
    plan = session.plan
    if plan.rule not in BUILT_IN:
        raise PlanError(
            f"rule {plan.rule!r}",
            got="a rule that the job registers",
            expected="one of Roundelay's own: machines that join get data, and no Python",
            remedy="Choose one of " + ", ".join(BUILT_IN) + ".",
        )
    optimizer = optimizer_of(session)
    for worker in range(1, plan.num_workers):
        assignment_of(session, worker, optimizer, (), 0)


def optimizer_of(session: Session) -> bytes:
    """The optimizer of a run as data, with the rates of all of its updates.

    Raises:
        JobError: it cannot travel, or a schedule has no end.
    """
    job, total = session.job, session.run_length().total
    if total is None and job.scheduler is not None:
        raise JobError(
            "Job(scheduler=...) in a run of unknown length",
            got="batches whose number is not known before they are read",
            expected="a known number of updates: machines that join get a table of learning rates",
            remedy="Give --steps, or batches that have a length, such as a DataLoader.",
        )
    named = without_gradients(session.captured.model)
    return optimizers.encoded(optimizers.plain_optimizer(job.optimizer, job.scheduler, named, total or 1))


def assignment_of(
    session: Session, worker: int, optimizer: bytes, names: Sequence[str], generation: int
) -> tuple[bytes, bytes]:
    """A worker's assignment, and the tensors of its state, as bytes.

    Args:
        session: not yet run.
        worker: number of the worker.
        optimizer: as :func:`optimizer_of` gives it.
        names: of the machines of all workers.
        generation: of the run.

    Raises:
        CaptureError: something cannot travel.
    """
    plan, captured, initial = session.plan, session.captured, session.initial
    graph, tensors = captured.graph, dict[str, torch.Tensor]()
    stages = []
    for number in plan.stages_of(worker):
        spec = session.partition.stages[number]
        table, own = held_state.encode(_held(initial, spec))
        tensors |= {f"{number} {name}": tensor.detach().cpu().contiguous().clone() for name, tensor in own.items()}
        stages.append(
            Assigned(
                spec,
                plain_bytes.encoded(plain_stage(captured, spec)),
                {name: graph.parameters[name] for name in spec.parameters},
                table,
                {name: tensor.stride() for name, tensor in own.items() if not tensor.is_contiguous()},
                {name: known for name in (*spec.inputs, *spec.outputs) if (known := captured.layout(name)) is not None},
            )
        )
    assignment = Assignment(
        plan.text(),
        worker,
        tuple(names),
        session.seed,
        session.extent.start_g,
        initial.updates,
        optimizer,
        tuple(stages),
        graph.inputs,
        graph.batch,
        graph.metrics,
        graph.loss_counts,
        graph.labels_per_row,
        generation,
    )
    return _ENCODER.encode(assignment), save_tensors(tensors)


def _held(initial: Initial, spec: StageSpec) -> HeldState:
    parameters = {name: initial.parameters[name] for name in spec.parameters}
    optimizer = {name: dict(initial.optimizer[name]) for name in (*parameters, WHOLE) if name in initial.optimizer}
    return HeldState(
        spec.stage,
        {name: Shard(whole_ranges(tensor.shape), tensor) for name, tensor in parameters.items()},
        {name: initial.buffers[name] for name in spec.buffers},
        optimizer,
        initial.flight_of(spec.stage),
    )


def read_assignment(data: bytes, name: str, memory_bytes: int) -> tuple[Assignment, Reading]:
    """An assignment from bytes from outside, and its plan; what it needs must fit into a machine's memory.

    Args:
        data: the bytes.
        name: of this machine.
        memory_bytes: that the machine allows.

    Raises:
        UsageError: they are none for this machine, or it needs more memory.
        PlanError: the plan cannot be run.
    """
    try:
        assignment = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refused(f"{error}") from error
    plan = Plan.parse(assignment.plan)
    if plan.num_stages > MOST_STAGES or plan.micro_batches > MOST_MICRO_BATCHES:
        raise _refused(f"a plan with {plan.num_stages:,} stages and {plan.micro_batches:,} micro-batches")
    reading = _ours(partial(check_plan, plan))
    own = dict(enumerate(reading.plan.worker_stages)).get(assignment.worker, ())
    if not own or tuple(stage.spec.stage for stage in assignment.stages) != own:
        raise _refused("the stages of another worker")
    names = assignment.names
    if len({*names}) != len(names) or dict(enumerate(names)).get(assignment.worker) != name:
        raise _refused("the stages of another machine")
    if len(names) != reading.plan.num_workers:
        raise _refused(f"the names of {len(names):,} machines for {reading.plan.num_workers} workers")
    if len(reading.plan.stages[0].workers) > 1 or reading.plan.rule not in BUILT_IN:
        raise _refused("a plan for other machines than those that join")
    needed = sum(_needed(reading, stage) for stage in own)
    if needed > memory_bytes:
        raise UsageError(
            "memory for this machine's part of the model",
            got=f"{needed:,} bytes needed",
            expected=f"at most {memory_bytes:,}, the --memory-limit",
            remedy="Raise it, or ask the host for a smaller part.",
        )
    return assignment, reading


def _needed(reading: Reading, stage: int) -> int:
    """Bytes of a stage: weights, gradients, two states, versions and tapes in flight."""
    own, size = reading.plan.stages[stage], reading.plan.num_stages
    in_flight = own.in_flight or (size - stage if not reading.flushes else reading.plan.micro_batches)
    return own.parameter_bytes * (4 + in_flight) + own.tape_bytes * in_flight


def task_of(assignment: Assignment, reading: Reading, state: bytes) -> Task:
    """The task of a machine, whose states are needed for nothing yet.

    Args:
        assignment: as read.
        reading: of its plan.
        state: tensors, as bytes from outside.

    Raises:
        UsageError: the state does not fit.
        PlanError: a stage cannot be rebuilt.
    """
    return _ours(partial(_task, assignment, reading, state))


def _task(assignment: Assignment, reading: Reading, state: bytes) -> Task:
    plains = {one.spec.stage: plain_bytes.decoded(one.plain) for one in assignment.stages}
    held = _states(assignment, load_tensors(state))
    initial = _initial(assignment, held)
    parameters = {name: own for one in assignment.stages for name, own in one.parameters.items()}
    trained = {n: torch.nn.Parameter(initial.parameters[n], own.trainable) for n, own in parameters.items()}
    plain = optimizers.decoded(assignment.optimizer)
    layouts = {name: known for one in assignment.stages for name, known in one.layouts.items()}
    model = PlainModel(module_of(trained), _graph(assignment, parameters), plains, layouts)
    return Task(
        works=works_of(reading, emit(reading)),
        partition=_partition(assignment, reading.plan.num_stages),
        captured=model,
        job=Job(
            model=model.model,
            loss=_no_data,
            batches=_no_data,  # the host reads
            optimizer=optimizers.optimizer_of(plain),
            scheduler=optimizers.scheduler_of(plain),
        ),
        seed=assignment.seed,
        extent=Extent(start_g=assignment.start_g, start_batch=assignment.updates),
        initial=initial,
        handlers={},
        states=StateUse(),
    )


def place_of(reading: Reading, rank: int, names: Sequence[str], credentials: Credentials, generation: int) -> Place:
    """What a machine has in a run; messages have at most a few times the bytes of the plan's.

    Args:
        reading: of the plan.
        rank: number of the machine's worker.
        names: of the machines of all workers.
        credentials: its own.
        generation: of the run.
    """
    plan = reading.plan
    largest = max((n for edge in plan.edges for n in (edge.forward_bytes, edge.backward_bytes)), default=0)
    reports = max(_needed(reading, stage) for stage in range(plan.num_stages))
    return Place(
        rank,
        tuple(names),
        credentials,
        generation,
        data_bytes=4 * largest + 2**20,
        report_bytes=2 * reports + MOST_BYTES,
        silent_ms=silent_ms(plan),
    )


def silent_ms(plan: Plan) -> int:
    """Milliseconds that a ping's answer may take: it waits behind what the slowest line still carries."""
    lines = [(edge.latency_s or plan.latency_s, edge.bytes_per_s or plan.bytes_per_s) for edge in plan.edges]
    needed = max((2 * latency_s + QUEUED_BYTES / max(1.0, rate) for latency_s, rate in lines), default=0.0)
    return round(min(MOST_SILENT_MS, max(LEAST_SILENT_MS, 1e3 * needed)))


def _states(assignment: Assignment, tensors: Mapping[str, torch.Tensor]) -> list[HeldState]:
    found = []
    for one in assignment.stages:
        prefix = f"{one.spec.stage} "
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        for name, strides in one.strides.items():
            own[name] = torch.empty_strided(own[name].shape, strides, dtype=own[name].dtype).copy_(own[name])
        found.append(held_state.decode(one.state, own))
    return found


def _initial(assignment: Assignment, held: list[HeldState]) -> Initial:
    parameters = {name: shard.tensor for own in held for name, shard in own.parameters.items()}
    for one in assignment.stages:
        for name in one.spec.parameters:
            said, tensor = one.parameters[name], parameters[name]
            if tuple(tensor.shape) != said.shape or str(tensor.dtype) != f"torch.{said.dtype}":
                raise _refused(f"parameter {name!r} of shape {tuple(tensor.shape)} {tensor.dtype}")
    flights = {(own.stage, 0): own.flight for own in held if own.flight is not None}
    return Initial(
        parameters,
        {name: buffer for own in held for name, buffer in own.buffers.items()},
        {name: state for own in held for name, state in own.optimizer.items()},
        assignment.updates,
        flights if len(flights) == len(held) else None,
    )


def _graph(assignment: Assignment, parameters: Mapping[str, Parameter]) -> Graph:
    return Graph(
        ops=(),
        inputs=assignment.inputs,
        batch=assignment.batch,
        outputs=(),
        values={},
        parameters=dict(parameters),
        buffers={name: 0 for one in assignment.stages for name in one.spec.buffers},
        cuts=(),
        loss_counts=assignment.loss_counts,
        fingerprint="",
        sample_rows=1,
        metrics=assignment.metrics,
        labels_per_row=assignment.labels_per_row,
    )


def _partition(assignment: Assignment, num_stages: int) -> Partition:
    """All stages, of which those of other machines have only the edges to this one's."""
    own = {one.spec.stage: one.spec for one in assignment.stages}
    edges: list[Edge] = [edge for spec in own.values() for edge in spec.receives if edge.source not in own]
    others = {k: StageSpec(k, (), (), (), ()) for k in range(num_stages) if k not in own}
    for edge in edges:
        if edge.source not in others:
            raise _refused(f"an edge from stage {edge.source}")
        others[edge.source] = replace(others[edge.source], sends=(*others[edge.source].sends, edge))
    every = others | own
    return Partition(tuple(every[k] for k in range(num_stages)))


def _ours(read: Callable[[], _T]) -> _T:
    """What is read from bytes from outside; whatever fails is an error of ours."""
    try:
        return read()
    except (RoundelayError, MemoryError):
        raise
    except Exception as error:
        raise _refused(f"what does not fit together: {type(error).__name__}: {error}") from error


def _no_data(*values: Any) -> NoReturn:
    raise AssertionError("the host reads the data, and the loss is one of the stages")


def _refused(got: str) -> UsageError:
    return UsageError(
        "assignment from the host",
        got=got,
        expected="stages, a plan and a state for this machine, as Roundelay writes them",
        remedy="Check that the host runs the same version of Roundelay.",
    )
