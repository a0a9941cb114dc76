"""How fast a machine computes."""

from __future__ import annotations

import pytest

from roundelay.observe import machine_probe


@pytest.mark.parametrize(("quota", "seconds"), [(None, 0.01), (4.0, 0.01), (0.5, 0.02)])
def test_a_quota_of_less_than_a_core_makes_a_machine_slower(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, seconds: float
) -> None:
    monkeypatch.setattr(machine_probe, "core_quota", lambda: quota)
    monkeypatch.setattr(machine_probe, "_once", lambda a: 0.01)
    assert machine_probe.probe_s() == pytest.approx(seconds)


def test_a_machine_is_measured() -> None:
    assert 0 < machine_probe.probe_s() < 100
