"""``roundelay host``: train with machines that join by an invitation."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue

import psutil
import torch

from roundelay import __version__
from roundelay.cli.changed_by_job import PathResolver
from roundelay.cli.gathering import REASONS, Gathering, Waiting
from roundelay.cli.host_options import HostOptions, address_of, advertised_of
from roundelay.cli.hosted_plan import Draft, drafted
from roundelay.cli.options import RunOptions
from roundelay.cli.plan_from_options import PlannedJob
from roundelay.cli.screen import announce, show_json, show_lost, stderr
from roundelay.cli.train_command import RUNS, Prepared, discarding, prepare, train_prepared
from roundelay.errors import PeerLostError, RunError, UsageError, counted
from roundelay.ir.num_bytes import bytes_text
from roundelay.ir.plan import Plan
from roundelay.launching.last_words import one_line
from roundelay.launching.peer_group import Guard, PeerGroup
from roundelay.launching.stop_watchdog import start_watchdog
from roundelay.membership.roster import Roster, Seat
from roundelay.observe.run_folder import REFUSED, check_vacant
from roundelay.peers import members, refusals
from roundelay.peers.door import Door, Terms
from roundelay.peers.gate import Gate
from roundelay.peers.loop_thread import LoopThread
from roundelay.peers.members import HOST_NAME, Members
from roundelay.peers.messages import Versions
from roundelay.peers.refusals import RefusalLog
from roundelay.planner.plan_options import Choices
from roundelay.planning.explain_plan import plan_notices
from roundelay.planning.job_file import load_job
from roundelay.session.assignment import ASSIGNMENT, READY, STATE, assignment_of, check_travels, optimizer_of, place_of
from roundelay.session.offer import own_offer
from roundelay.session.stop_condition import Length
from roundelay.transport import grpc_stream
from roundelay.trust.authority import HOST, new_authority
from roundelay.trust.invitation import new_run

GENERATION = 0
VALID = timedelta(days=30)
SEES = (
    "Whoever joins is sent a part of the weights and what flows through it; the last machine also what the loss reads. "
    "The data and all other weights stay here."
)
READY_S = 600.0
"""Seconds in which a machine must be ready, beyond three times those in which the slowest line carries all parts."""

SHARE = 0.8
"""Of the memory that is free, what this machine's own part may need."""


def host_command(job_file: Path, choices: Choices, options: HostOptions, *, as_json: bool) -> int:
    """Host a run; returns the exit code.

    Args:
        job_file: defines the job.
        choices: for the plan.
        options: of the run.
        as_json: print one JSON object at the end.
    """
    address_of(options.listen), advertised_of(options.advertise)
    paths, run = PathResolver(), options.of_run()
    if run.out is not None:
        check_vacant(run.out)
    job = load_job(job_file, run.seed)
    run = run.resolved(paths)
    draft = drafted(job, choices, options.peers, run.seed, run.resume, quiet=as_json)
    prepared = prepare(draft.planned, run, paths.of(RUNS), None, quiet=as_json)
    with discarding(prepared.folder), ExitStack() as stack:
        check_travels(prepared.session)
        waiting = _open(prepared, options, stack)
        names, planned = _gathered(waiting, draft, options)
        prepared = _prepared_for(planned, prepared, run)
        _say_planned(prepared.session.plan, names)
        group = _assigned(prepared, waiting, names)
        with _telling_loss(group):
            summary = train_prepared(prepared, run, paths.of(RUNS), group, quiet=as_json)
    if as_json:
        show_json(summary)
    return 0


@contextmanager
def _telling_loss(group: PeerGroup) -> Iterator[None]:
    """Tell of this machine what the others are told, if the run fails here; and end it if it stays stopped."""
    start_watchdog(group.called(group.rank))
    try:
        yield
    except RunError as error:
        if not isinstance(error, PeerLostError):
            show_lost(group.called(group.rank), one_line(f"{error.subject}: {error.got}"))
        raise


def _open(prepared: Prepared, options: HostOptions, stack: ExitStack) -> Waiting:
    """Open the door."""
    run = new_run()
    authority = new_authority(f"roundelay-{run}", datetime.now(UTC), VALID)
    own = authority.issue(HOST_NAME, HOST)
    log = RefusalLog(
        prepared.folder.path / REFUSED, (*refusals.REASONS, *members.REASONS, *REASONS, *grpc_stream.REASONS)
    )
    stack.callback(log.close)
    loop = LoopThread("peers")
    stack.callback(loop.close)
    gate = Gate(loop, log.refuse, address_of(options.listen), advertised_of(options.advertise))
    stack.callback(gate.close)
    came, left = SimpleQueue[Seat](), SimpleQueue[str]()
    texts = Members(own, gate, log.refuse, left.put)
    stack.callback(texts.close)
    terms = Terms(run, authority, (gate.address,), Versions(__version__, torch.__version__), GENERATION)
    door = Door(terms, Roster((), options.peers - 1), log, gate, came.put)
    stack.callback(door.close)
    return Waiting(authority, own, gate, texts, door, came, left, log.refuse)


def _gathered(waiting: Waiting, draft: Draft, options: HostOptions) -> tuple[list[str], PlannedJob]:
    """Invite the other machines; their names, this one's first, and the plan for them, when all are here."""
    stderr.print(SEES, markup=False)
    own = own_offer(int(SHARE * psutil.virtual_memory().available))
    outside = not ipaddress.ip_address(waiting.gate.listener.address[0]).is_loopback
    gathering = Gathering(waiting, options.peers, own, options.wait_s, outside=outside)
    while True:
        names, offers = gathering.gathered()
        planned = draft.for_machines(offers)
        if gathering.complete():
            break
    for line in plan_notices(planned.plan):
        announce(f"{line}.", quiet=False)
    return names, planned


def _prepared_for(planned: PlannedJob, prepared: Prepared, run: RunOptions) -> Prepared:
    """The run by another plan."""
    session = planned.session(run.seed, Length(steps=run.steps, epochs=run.epochs), run.resume)
    return replace(prepared, planned=planned, session=session)


def _say_planned(plan: Plan, names: Sequence[str]) -> None:
    texts = []
    for worker, name in enumerate(names):
        own = [plan.stages[stage] for stage in plan.stages_of(worker)]
        ends = " and ".join(f"up to {stage.segments[-1]}" for stage in own)
        held = bytes_text(sum(stage.parameter_bytes for stage in own))
        texts.append(f"{name} {ends}, {held} of weights, {counted(plan.workers[worker].threads, 'thread')}")
    stderr.print(f"Planned for these machines: {'; '.join(texts)}.", markup=False)


def _assigned(prepared: Prepared, waiting: Waiting, names: Sequence[str]) -> PeerGroup:
    """Leave for each machine what it is assigned."""
    session, optimizer = prepared.session, optimizer_of(prepared.session)
    sent = 0
    for worker, name in enumerate(names[1:], 1):
        assignment, state = assignment_of(session, worker, optimizer, names, GENERATION)
        waiting.texts.leave(name, ASSIGNMENT, assignment)
        waiting.texts.leave(name, STATE, state)
        sent += len(state)
    slowest = min((edge.bytes_per_s for edge in session.plan.edges if edge.bytes_per_s), default=0.0)
    waiting_s = READY_S + (3 * sent / slowest if slowest else 0.0)
    for name in names[1:]:
        why = waiting.texts.get(f"{READY} {name}", waiting_s)
        for kind in (ASSIGNMENT, STATE):
            waiting.texts.drop(name, kind)
        if why:
            raise UsageError(
                name,
                got=why,
                expected="a machine that takes the part that it is assigned",
                remedy="Host the run again without it, or with another part for it.",
            )
    place = place_of(session.reading, 0, names, waiting.authority.issue(names[0]), GENERATION)
    return PeerGroup(place, waiting.texts, Guard(waiting.refuse, waiting.gate))
