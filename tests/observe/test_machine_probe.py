"""How fast a machine computes."""

from __future__ import annotations

import time

import pytest
import torch

from roundelay.observe import machine_probe


@pytest.mark.parametrize(
    ("threads", "quota", "seconds"),
    [(1, None, 0.01), (1, 4.0, 0.01), (1, 0.5, 0.02), (3, None, 0.01), (3, 2.0, 0.015), (3, 0.5, 0.06)],
)
def test_a_quota_of_fewer_cores_than_threads_makes_a_machine_slower(
    monkeypatch: pytest.MonkeyPatch, threads: int, quota: float | None, seconds: float
) -> None:
    monkeypatch.setattr(machine_probe, "core_quota", lambda: quota)
    monkeypatch.setattr(machine_probe, "_once", lambda a, clock: 0.01)
    assert machine_probe.probe_s(threads) == pytest.approx(seconds)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_machine_is_measured_with_its_threads_and_keeps_those_it_had(threads: int) -> None:
    assert 0 < machine_probe.probe_s(threads) < 100
    assert torch.get_num_threads() == 1


def test_several_threads_are_timed_by_the_clock_and_one_by_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(machine_probe, "_once", lambda a, clock: seen.append((clock, torch.get_num_threads())) or 1.0)
    machine_probe.probe_s(1), machine_probe.probe_s(3)
    assert set(seen) == {(time.thread_time, 1), (time.perf_counter, 3)}
