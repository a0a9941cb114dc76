"""``roundelay host``: train with machines that join by an invitation."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from roundelay import __version__
from roundelay.cli.changed_by_job import PathResolver
from roundelay.cli.host_options import HostOptions, address_of
from roundelay.cli.plan_from_options import PlanSource, plan_job
from roundelay.cli.screen import show_json, stderr
from roundelay.cli.train_command import RUNS, Prepared, discarding, prepare, train_prepared
from roundelay.errors import DeadlineError, UsageError
from roundelay.launching.peer_group import Guard, PeerGroup
from roundelay.membership.roster import Roster, Seat
from roundelay.observe.run_folder import check_vacant
from roundelay.peers import members, refusals
from roundelay.peers.door import Door, Terms
from roundelay.peers.listener import member_front
from roundelay.peers.loop_thread import LoopThread
from roundelay.peers.member_store import HOST_NAME
from roundelay.peers.members import Members
from roundelay.peers.messages import Versions
from roundelay.peers.refusals import RefusalLog
from roundelay.planner.plan_options import Choices
from roundelay.planning.job_file import load_job
from roundelay.session.assignment import ASSIGNMENT, STATE, assignment_of, check_travels, place_of
from roundelay.transport import grpc_stream
from roundelay.transport.grpc_stream import name_of
from roundelay.trust.authority import HOST, new_authority
from roundelay.trust.invitation import new_run

RULE = "ravnest"
"""The default: no machine waits for another's turn."""

GENERATION = 0
REFUSED = "refused.jsonl"
VALID = timedelta(days=30)
_TICK_S = 0.2


def host_command(job_file: Path, choices: Choices, options: HostOptions, *, as_json: bool) -> int:
    """Host a run; returns the exit code.

    Args:
        job_file: defines the job.
        choices: for the plan.
        options: of the run.
        as_json: print one JSON object at the end, and each invitation as one before.
    """
    listen = address_of(options.listen)
    paths, run = PathResolver(), options.of_run()
    if run.out is not None:
        check_vacant(run.out)
    job = load_job(job_file, run.seed)
    run = run.resolved(paths)
    asked = replace(choices, workers=options.peers, transport="grpc", rule=choices.rule or RULE)
    planned = plan_job(job, asked, run.seed, PlanSource(resume=run.resume), quiet=as_json)
    if planned.plan.num_workers != options.peers:
        raise UsageError(
            "--peers",
            got=str(options.peers),
            expected=f"{planned.plan.num_workers}: the model cannot be cut into more stages",
            remedy="Invite fewer machines, or bring a larger model.",
        )
    prepared = prepare(planned, run, paths.of(RUNS), None, quiet=as_json)
    with discarding(prepared.folder), ExitStack() as stack:
        check_travels(prepared.session)
        group = _gathered(prepared, options, listen, stack)
        summary = train_prepared(prepared, run, paths.of(RUNS), group, quiet=as_json)
    if as_json:
        show_json(summary)
    return 0


def _gathered(prepared: Prepared, options: HostOptions, listen: tuple[str, int], stack: ExitStack) -> PeerGroup:
    """Invite, wait until all have joined, and leave for each what it is assigned."""
    session, run = prepared.session, new_run()
    authority = new_authority(f"roundelay-{run}", datetime.now(UTC), VALID)
    own = authority.issue(HOST_NAME, HOST)
    log = RefusalLog(prepared.folder.path / REFUSED, (*refusals.REASONS, *members.REASONS, *grpc_stream.REASONS))
    stack.callback(log.close)
    loop = LoopThread("peers")
    stack.callback(loop.close)
    texts = Members(own, loop, (listen[0], 0), log.refuse)
    stack.callback(texts.close)
    came: SimpleQueue[Seat] = SimpleQueue()
    terms = Terms(run, authority, (texts.address,), Versions(__version__, torch.__version__), GENERATION)
    door = Door(terms, Roster((), options.peers - 1), log, loop, listen, came.put)
    stack.callback(door.close)
    workers = range(1, options.peers)
    expiry = int(time.time() + options.wait_s) + 1
    for worker in workers:
        _invite(door.invite(name_of(worker), expiry).text(), worker)
    for worker in workers:
        assignment, state = assignment_of(session, worker, GENERATION)
        texts.leave(name_of(worker), ASSIGNMENT, assignment)
        texts.leave(name_of(worker), STATE, state)
    _wait(came, options)
    place = place_of(session.reading, 0, authority.issue(name_of(0)), listen[0], GENERATION)
    return PeerGroup(place, texts, Guard(log.refuse, partial(member_front, log.refuse)))


def _invite(text: str, worker: int) -> None:
    stderr.print(f"For machine {worker + 1}, once, within the time of --wait-s:", markup=False)
    stderr.print(f"  roundelay join {text}", markup=False, soft_wrap=True)


def _wait(came: SimpleQueue[Seat], options: HostOptions) -> None:
    """Wait until every seat is taken.

    Raises:
        DeadlineError: it takes too long.
    """
    until, seats = time.monotonic() + options.wait_s, set[int]()
    while len(seats) < options.peers - 1:
        if time.monotonic() > until:
            raise DeadlineError(
                "machines that were invited",
                got=f"{len(seats)} of {options.peers - 1} within {options.wait_s:g} s",
                expected="all of them",
                remedy="Type the `roundelay join` lines on the other machines; --wait-s gives more time.",
            )
        try:
            seat = came.get(timeout=_TICK_S)
        except Empty:
            continue
        if seat.number not in seats:
            seats.add(seat.number)
            stderr.print(
                f"{seat.name} has joined: {len(seats) + 1} of {options.peers} machines are here.", markup=False
            )
