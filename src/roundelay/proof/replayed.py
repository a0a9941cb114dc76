"""Replays the trace of a run whose order was free, and compares: all of it, or a window that begins at a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from roundelay.checkpoint.in_flight_state import ANY, StageInFlight
from roundelay.errors import UsageError
from roundelay.frontend import RngKey
from roundelay.ir.micro_batch import MicroBatch
from roundelay.observe.action_trace import ActionTrace
from roundelay.observe.digest import digest
from roundelay.proof.reference_inputs import ReferenceOptimizers, copied, reference_stages, setting_of
from roundelay.proof.reference_start import Note, ReferenceStart
from roundelay.reference import Replayed, ReplayedStage, replay
from roundelay.reference.replay import BACKWARD, FORWARD
from roundelay.reference.trainer import Recipe
from roundelay.runtime.loading.batch_reader import read_micro_batches
from roundelay.runtime.loading.prefetch import Registers
from roundelay.runtime.optimizer.optimizer_state import WHOLE
from roundelay.session.run_record import Trained
from roundelay.session.training import Session


def replayed_run(session: Session, origin: ReferenceStart, trained: Trained, notes: list[Note]) -> Replayed:
    """Replay a run that has just ended, and append digests of all that is computed.

    Args:
        session: of the run.
        origin: where it began.
        trained: its result.
        notes: added to.
    """

    def audit(kind: str, stage: int, holder: int, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        notes.append(((kind, stage, holder, number), digest(tensors)))

    traces = [trained.actions[stage] for stage in range(session.plan.num_stages)]
    return _replay(session, origin, traces, trained.snapshot.optimizer.get(WHOLE, {}), audit=audit)


def replayed_trace(
    session: Session,
    origin: ReferenceStart,
    traces: Sequence[ActionTrace],
    window: int | None,
    advance: Callable[[], None],
) -> Replayed:
    """Replay what a run has written down.

    Args:
        session: of the same job and plan, not run; from the run's first update, or from a checkpoint of it.
        origin: where the session begins.
        traces: of all stages.
        window: at most so many letters of each stage; None: all to the end.
        advance: called after each letter.

    Raises:
        UsageError: the checkpoint is of another moment than the trace has.
    """
    own = traces if session.start is None else [_since(session, trace) for trace in traces]
    ended = all(trace.ended for trace in traces)
    if window is not None:
        own = [_cut(trace, window + len(_flight(session, stage))) for stage, trace in enumerate(own)]

    def audit(kind: str, stage: int, holder: int, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if kind != "update":
            advance()

    return _replay(session, origin, own, {}, audit=audit, whole=window is None and ended)


def told(replayed: Replayed) -> str:
    """The first difference that a replay has found, in words; empty if there is none."""
    if replayed.differing:
        stage, letter = replayed.differing[0]
        return f"replay DIFFERS at letter {letter} of stage {stage}"
    if replayed.stuck:
        stage, letter = replayed.stuck[0]
        return f"replay DIFFERS at letter {letter} of stage {stage}: what it needs was never computed"
    return ""


def _replay(
    session: Session,
    origin: ReferenceStart,
    traces: Sequence[ActionTrace],
    like: Mapping[str, Any],
    *,
    audit: Callable[..., None] | None = None,
    whole: bool = True,
) -> Replayed:
    captured, plan, job, start = session.captured, session.plan, session.job, session.start
    stages = reference_stages(session)
    named = copied(captured, origin, stages)
    optimizers = ReferenceOptimizers(job, like, plan.devices)
    states = None if start is None else session.initial.optimizer
    restore = None if states is None else partial(optimizers.restore, states)
    recipe = Recipe(optimizers.make, job.scheduler, restore, session.initial.updates)
    edges = session.partition.edges
    given = [
        ReplayedStage(
            stage=stage,
            letters=trace.letters,
            digests=trace.digests,
            before=tuple(edge.source for edge in edges if edge.target == k),
            behind=tuple(edge.target for edge in edges if edge.source == k and edge.gradients),
            flight=_flight(session, k),
        )
        for k, (stage, trace) in enumerate(zip(stages, traces, strict=True))
    ]
    return replay(
        setting_of(session.reading, captured.graph, states, None, ()),
        given,
        named,
        origin.buffers_of(0),
        _micro_batches(session),
        recipe,
        lambda number: RngKey(session.seed, number),
        digest,
        lambda optimizer, own: optimizers.entries(optimizer, [name for name, _ in own]),
        (session.extent.start_g, session.initial.updates),
        audit=audit,
        whole=whole,
    )


def _micro_batches(session: Session) -> Iterator[Sequence[tuple[MicroBatch, dict[str, Any]]]]:
    captured, plan = session.captured, session.plan
    return iter(
        read_micro_batches(
            session.job.loader,
            session.seed,
            plan.micro_batches,
            session.extent,
            captured.values,
            min_rows=captured.graph.min_rows,
            registers=Registers(1, plan.deadline_s),
        )
    )


def _flight(session: Session, stage: int) -> dict[int, dict[str, torch.Tensor]]:
    """By micro-batch that a stage had in flight at the start, the weights that its forward has read."""
    flight = session.initial.flight_of(stage)
    return {} if flight is None else {g: _read(flight, version) for g, version in flight.versions.items()}


def _read(flight: StageInFlight, version: int) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in flight.weights[version, 0, ANY].items()}


def _since(session: Session, trace: ActionTrace) -> ActionTrace:
    """What follows in a trace on the checkpoint from which a session starts; forwards in flight come first.

    Raises:
        UsageError: at that update the trace has other forwards in flight, or it does not reach it.
    """
    if trace.head.first == (session.extent.start_g, session.initial.updates):  # the run has continued from it
        return trace
    flight, stage = _flight(session, trace.head.stage), trace.head.stage
    done = session.extent.start_g - trace.head.first[0]
    places = (i for i, letter in enumerate(trace.letters, 1) if letter == BACKWARD)
    at = next(islice(places, done - 1, None), -1) if done > 0 else 0 if done == 0 else -1
    forwards = trace.letters.count(FORWARD, 0, max(at, 0))
    if at < 0 or forwards - done != len(flight):
        raise UsageError(
            f"the checkpoint after update {session.initial.updates}, stage {stage}",
            got=f"{len(flight)} forwards in flight" if at >= 0 else "an update that the trace does not reach",
            expected=f"{forwards - done} by the trace" if at >= 0 else "a checkpoint of the run that wrote the trace",
            remedy="Give a checkpoint of this run.",
        )
    moved = {count - at + len(flight): found for count, found in trace.digests.items() if count >= at}
    return ActionTrace(trace.head, FORWARD * len(flight) + trace.letters[at:], moved, trace.ended)


def _cut(trace: ActionTrace, most: int) -> ActionTrace:
    return ActionTrace(trace.head, trace.letters[:most], trace.digests, ended=False)
