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
from roundelay.cli.host_options import RULE, HostOptions, address_of, advertised_of
from roundelay.cli.options import RunOptions
from roundelay.cli.plan_from_options import PlannedJob, PlanSource, plan_files, plan_job, plan_of
from roundelay.cli.screen import show_json, show_lost, stderr
from roundelay.cli.train_command import RUNS, Prepared, discarding, prepare, train_prepared
from roundelay.cores import all_threads, usable_cores
from roundelay.errors import PeerLostError, RunError, UsageError
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
from roundelay.planner.inherited_choices import inherited
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.price import priced
from roundelay.planner.prove_plan import prove
from roundelay.planner.source import Hardware
from roundelay.planning.collect_facts import collect_facts
from roundelay.planning.examined import Examined
from roundelay.planning.job_file import load_job
from roundelay.planning.memory_limit import check_memory
from roundelay.runtime.loading.prefetch import ignore_wait
from roundelay.session.assignment import ASSIGNMENT, READY, STATE, assignment_of, check_travels, optimizer_of, place_of
from roundelay.session.offer import (
    Offer,
    cluster_of,
    own_offer,
    threads_each,
)
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
    rule = choices.rule or (RULE if run.resume is None or not plan_files(run.resume) else None)
    asked = replace(choices, workers=options.peers, transport="grpc", rule=rule)
    planned = plan_job(job, asked, run.seed, PlanSource(resume=run.resume), quiet=as_json)
    if planned.plan.num_workers != options.peers:
        raise UsageError(
            "--peers",
            got=str(options.peers),
            expected=f"{planned.plan.num_workers}: the model cannot be cut into more stages",
            remedy="Invite fewer machines, or bring a larger model.",
        )
    resumed = None if run.resume is None else plan_of(run.resume, planned.plan.model)
    kept = resumed is not None and resumed == replace(planned.plan, deadline_s=resumed.deadline_s)
    facts = None if kept else _facts(planned, run.seed)
    asked = asked if resumed is None else asked.over(inherited(resumed, asked))
    prepared = prepare(planned, run, paths.of(RUNS), None, quiet=as_json)
    with discarding(prepared.folder), ExitStack() as stack:
        check_travels(prepared.session)
        waiting = _open(prepared, options, stack)
        gathering = _gathering(waiting, options)
        while True:
            names, offers = gathering.gathered()
            planned_for = prepared if facts is None else _replanned(prepared, facts, asked, offers, run)
            if gathering.complete():
                break
        prepared = planned_for
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


def _facts(planned: PlannedJob, seed: int) -> ModelFacts:
    """What the planner must know of the job when all machines are here: measured now, while this process may fork."""
    source = Examined(planned.job, planned.captured, seed, ignore_wait)
    threads = sorted({1, all_threads(torch.get_num_threads)})
    return collect_facts(source, precision=planned.plan.precision, threads=threads)


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


def _gathering(waiting: Waiting, options: HostOptions) -> Gathering:
    """Invite the other machines."""
    stderr.print(SEES, markup=False)
    own = own_offer(int(SHARE * psutil.virtual_memory().available))
    outside = not ipaddress.ip_address(waiting.gate.listener.address[0]).is_loopback
    return Gathering(waiting, options.peers, own, options.wait_s, outside=outside)


def _replanned(
    prepared: Prepared, facts: ModelFacts, asked: Choices, offers: Sequence[Offer], run: RunOptions
) -> Prepared:
    """The run by a plan for the machines as they are.

    Raises:
        PlanError: none fits.
    """
    planned, threads = prepared.planned, asked.threads or threads_each(offers)
    machine = Hardware(usable_cores(), threads, 0, cluster_of(offers))
    plan = priced(facts, replace(asked, threads=threads), machine).plan
    prove(plan)
    check_memory(Examined(planned.job, planned.captured, run.seed, ignore_wait), plan, asked.memory_limit)
    better = replace(planned, plan=plan)
    session = better.session(run.seed, Length(steps=run.steps, epochs=run.epochs), run.resume)
    return replace(prepared, planned=better, session=session)


def _say_planned(plan: Plan, names: Sequence[str]) -> None:
    texts = [
        f"{name} up to {stage.segments[-1]}, {bytes_text(stage.parameter_bytes)} of weights"
        for name, stage in zip(names, plan.stages, strict=True)
    ]
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
