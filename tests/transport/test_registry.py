"""A transport is registered by a row of the table, and, if its workers are forked, by what connects these."""

from __future__ import annotations

from dataclasses import replace

import pytest

import roundelay
from roundelay.errors import PlanError
from roundelay.ir.transports import TRANSPORTS
from roundelay.launching.launch import LAUNCHERS
from roundelay.transport import FORKED
from tests.api.jobs import make


def test_every_row_can_be_launched() -> None:
    assert {name for name, transport in TRANSPORTS.items() if transport.forks} == FORKED.keys()
    assert {transport.workers for transport in TRANSPORTS.values()} == LAUNCHERS.keys()
    assert all(name == transport.name for name, transport in TRANSPORTS.items())


def test_a_new_row_is_planned_with_its_link_and_verified_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, "mine", replace(TRANSPORTS["shm"], name="mine", latency_s=0.125))
    monkeypatch.setitem(FORKED, "mine", FORKED["shm"])
    job = make()
    plan = roundelay.plan(job, workers=2, transport="mine")
    assert (plan.transport, plan.latency_s) == ("mine", 0.125)
    assert roundelay.verify(job, plan=plan, steps=2).equal


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(PlanError, match="one of memory, shm, gloo, grpc, nccl"):
        roundelay.plan(make(), workers=2, transport="pigeon")
