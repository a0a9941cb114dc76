"""``roundelay join``: put this machine to work in a run that another hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import final

import psutil
import torch

from roundelay import __version__
from roundelay.cli.host_options import address_of, advertised_of
from roundelay.cli.memory_bound import bounded_memory
from roundelay.cli.screen import stderr
from roundelay.errors import RoundelayError, UsageError, WorkerLostError
from roundelay.ir.num_bytes import bytes_text
from roundelay.launching.launched_worker import run_follower
from roundelay.launching.peer_group import Guard, PeerGroup
from roundelay.launching.stop_watchdog import start_watchdog
from roundelay.peers.gate import Gate
from roundelay.peers.knock import Joined, knock
from roundelay.peers.loop_thread import LoopThread
from roundelay.peers.member_store import MemberStore
from roundelay.peers.messages import Versions
from roundelay.peers.reach import Reach
from roundelay.peers.refusals import RefusalLines
from roundelay.runtime.processes.determinism import deterministic
from roundelay.runtime.processes.worker_messages import Report
from roundelay.runtime.workload import unchanged
from roundelay.session.assignment import ASSIGNMENT, MOST_BYTES, READY, STATE, place_of, read_assignment, task_of
from roundelay.session.launched_states import fetched_use
from roundelay.session.offer import ENDED, OFFER, PROBE, PROBE_BYTES, VERDICT, own_offer
from roundelay.trust.invitation import Invitation

KNOCK_S = 60.0
"""Seconds in which the host must answer."""

ASSIGN_S = 7 * 24 * 3600.0
"""Seconds in which the run must begin: the others may come much later."""

LINK_S = 120.0
"""Seconds in which the link must have carried what it is measured with."""

MOST_WORDS = 4096

PROGRESS_S = 10.0

SHARE = 0.8
"""Of the memory that is free, what a run may need by default."""


def join_command(invitation: str, listen: str | None, advertise: str | None, memory_limit: int | None) -> int:
    """Join a run; returns the exit code.

    Args:
        invitation: the text.
        listen: address and port on which this machine listens.
        advertise: where other machines reach it, if not there.
        memory_limit: bytes that this machine's part may need; by default most of what is free.
    """
    own, elsewhere, given = address_of(listen), advertised_of(advertise), Invitation.parse(invitation)
    memory = int(SHARE * psutil.virtual_memory().available) if memory_limit is None else memory_limit
    refuse = RefusalLines(lambda line: stderr.print(line, markup=False)).refuse
    with ExitStack() as stack:
        loop = LoopThread("peers")
        stack.callback(loop.close)
        gate = Gate(loop, refuse, own, elsewhere)
        stack.callback(gate.close)
        return _joined(given, gate, memory, refuse)


def _joined(invitation: Invitation, gate: Gate, memory: int, refuse: Callable[[str, str], None]) -> int:
    joined = knock(invitation, KNOCK_S, Versions(__version__, torch.__version__))
    welcome = joined.welcome
    stderr.print(f"Joined run {welcome.run} as {welcome.name}, with up to {bytes_text(memory)}.", markup=False)
    with bounded_memory(memory), ExitStack() as stack:
        store = _store(joined, gate.loop)
        stack.callback(store.close)
        _offer(store, joined, memory, gate)
        refusing = stack.enter_context(ExitStack())
        refusing.push(partial(_tell, store, f"{READY} {welcome.name}"))
        assignment, reading = read_assignment(store.take(ASSIGNMENT, MOST_BYTES, ASSIGN_S), welcome.name, memory)
        rank, plan = assignment.worker, reading.plan
        stages = " and ".join(map(str, plan.stages_of(rank)))
        stderr.print(f"Assigned stage {stages} of {plan.num_stages}; rule {plan.rule}.", markup=False)
        task = task_of(assignment, reading, store.take(STATE, memory, ASSIGN_S))
        refusing.pop_all()
        store.put(f"{READY} {welcome.name}", "")
        place = place_of(reading, rank, assignment.names, joined.credentials, welcome.generation)
        group = PeerGroup(place, store, Guard(refuse, gate))
        use, _ = fetched_use(group)
        task = replace(task, states=use)
        with deterministic(plan.deterministic, threads=plan.threads):
            start_watchdog(welcome.name)
            code = run_follower(task, group, unchanged, _Progress(stages))
    ended = f"The host was asked to end: {group.farewell}" if group.farewell else "The run has ended"
    stderr.print(f"{ended}.", markup=False)
    return code


@final
class _Progress:
    """Shows how far this machine is: a line every ten seconds.

    Args:
        stages: that it runs, as text.
    """

    def __init__(self, stages: str) -> None:
        self._stages, self._told = stages, time.monotonic()

    def __call__(self, report: Report) -> None:
        """Look at a report."""
        if report.kind == "progress" and time.monotonic() - self._told > PROGRESS_S:
            self._told = time.monotonic()
            busy = report.data["busy_s"] / max(report.data["wall_s"], 1e-9)
            line = f"stage {self._stages}: {report.data['update']:,} updates, busy {busy:.0%} of the time"
            stderr.print(line, markup=False)


def _tell(store: MemberStore, name: str, kind: object, error: BaseException | None, trace: object) -> None:
    """Tell the host why this machine does not take part."""
    if isinstance(error, RoundelayError):
        with suppress(RoundelayError):
            store.put(name, str(error)[:MOST_WORDS])


def _offer(store: MemberStore, joined: Joined, memory: int, gate: Gate) -> None:
    """Say what this machine offers.

    Raises:
        UsageError: the host refuses it.
    """
    rtt_s, bytes_per_s = store.link(PROBE, PROBE_BYTES, LINK_S)
    name, reach = joined.welcome.name, Reach(joined.credentials, joined.welcome.name, gate)
    offer = own_offer(memory, rtt_s, bytes_per_s, gate.address)
    store.put(f"{OFFER} {name}", offer.text())
    rate = f"{8e-6 * bytes_per_s:,.0f} Mbit/s and {1e3 * rtt_s:.3g} ms to the host"
    stderr.print(f"Measured: {rate}; waiting for the others.", markup=False)
    why = store.take(VERDICT, MOST_WORDS, ASSIGN_S).decode(errors="replace")
    reach.close()
    if why == ENDED:
        raise WorkerLostError(
            "host",
            got=why,
            expected="a host that waits until all machines are here",
            remedy="Ask for a new invitation when it hosts again.",
        )
    if why:
        raise UsageError(
            "this machine in the run",
            got=why,
            expected="one that computes the same bits as the host, and that others reach",
            remedy="Then ask for a new invitation.",
        )


def _store(joined: Joined, loop: LoopThread) -> MemberStore:
    """The members' service at the address at which the host has answered."""
    host = joined.door[0]
    ports = [port for _, port in joined.welcome.members]
    return MemberStore((host, ports[0]), joined.credentials, joined.welcome.name, loop)
