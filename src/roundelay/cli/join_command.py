"""``roundelay join``: put this machine to work in a run that another hosts."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from functools import partial

import psutil
import torch

from roundelay import __version__
from roundelay.cli.host_options import LOOPBACK, address_of
from roundelay.cli.memory_bound import bounded_memory
from roundelay.cli.screen import stderr
from roundelay.errors import UsageError
from roundelay.ir.num_bytes import bytes_text
from roundelay.launching.launched_worker import run_follower
from roundelay.launching.peer_group import Guard, PeerGroup
from roundelay.launching.process_group import neighbours
from roundelay.peers.knock import Joined, knock
from roundelay.peers.listener import member_front
from roundelay.peers.loop_thread import LoopThread
from roundelay.peers.member_store import MemberStore
from roundelay.peers.messages import Versions
from roundelay.peers.refusals import RefusalLines
from roundelay.runtime.processes.determinism import deterministic
from roundelay.runtime.worker import unchanged
from roundelay.session.assignment import ASSIGNMENT, MOST_BYTES, STATE, place_of, read_assignment, task_of
from roundelay.session.launched_states import fetched_use
from roundelay.trust.invitation import Invitation

KNOCK_S = 60.0
"""Seconds in which the host must answer."""

ASSIGN_S = 7 * 24 * 3600.0
"""Seconds in which the run must begin: the others may come much later."""

SHARE = 0.8
"""Of the memory that is free, what a run may need by default."""


def join_command(invitation: str, listen: str | None, memory_limit: int | None) -> int:
    """Join a run; returns the exit code.

    Args:
        invitation: the text.
        listen: address at which other machines reach this one.
        memory_limit: bytes that this machine's part may need; by default most of what is free.
    """
    own = address_of(listen)[0]
    memory = int(SHARE * psutil.virtual_memory().available) if memory_limit is None else memory_limit
    joined = knock(Invitation.parse(invitation), KNOCK_S, Versions(__version__, torch.__version__))
    welcome = joined.welcome
    stderr.print(f"Joined run {welcome.run} as {welcome.name}, with up to {bytes_text(memory)}.", markup=False)
    with bounded_memory(memory), ExitStack() as stack:
        loop = LoopThread("peers")
        stack.callback(loop.close)
        store = _store(joined, loop)
        stack.callback(store.close)
        rank = welcome.seat + 1
        assignment, reading = read_assignment(store.take(ASSIGNMENT, MOST_BYTES, ASSIGN_S), rank, memory)
        plan = reading.plan
        stages = " and ".join(map(str, plan.stages_of(rank)))
        stderr.print(f"Assigned stage {stages} of {plan.num_stages}; rule {plan.rule}.", markup=False)
        state = store.take(STATE, memory, ASSIGN_S)
        place = place_of(reading, rank, joined.credentials, own, welcome.generation)
        refuse = RefusalLines(lambda line: stderr.print(line, markup=False)).refuse
        group = PeerGroup(place, store, Guard(refuse, partial(member_front, refuse)))
        use, _ = fetched_use(group)
        task = task_of(assignment, reading, state, use)
        _check_reachable(joined, own, max(neighbours(task.works[rank].program), default=0) > rank)
        with deterministic(plan.deterministic, threads=plan.threads):
            code = run_follower(task, group, unchanged)
    stderr.print("The run has ended." if not code else "The run has failed; the host tells why.", markup=False)
    return code


def _store(joined: Joined, loop: LoopThread) -> MemberStore:
    """The members' service at the address at which the host has answered."""
    host = joined.door[0]
    ports = [port for _, port in joined.welcome.members]
    return MemberStore((host, ports[0]), joined.credentials, joined.welcome.name, loop)


def _check_reachable(joined: Joined, own: str, serves: bool) -> None:
    """Refuse to listen on loopback only where a machine on another host has to reach this one.

    Raises:
        UsageError: it is so.
    """
    here = socket.gethostbyname(joined.door[0]).startswith("127.")
    if serves and own == LOOPBACK and not here:
        raise UsageError(
            "--listen",
            got=f"none, so that nobody outside of this machine reaches {LOOPBACK}",
            expected="an address at which the machine with the next stage reaches this one",
            remedy="Ask for a new invitation, and give --listen ADDRESS; `ip -brief address` shows those of this "
            "machine.",
        )
