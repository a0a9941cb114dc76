"""What the screen shows of a training."""

from __future__ import annotations

import pytest

from roundelay.cli.train_progress import ScreenObserver
from roundelay.session.events import Saved


def test_checkpoints_left_out_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    screen = ScreenObserver(None, quiet=True)
    for event in (Saved("run/checkpoint", 2), Saved("run/checkpoint", 6, 3), Saved("run/checkpoint", 9, 2)):
        screen(event)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("left out") == 1
    assert "3 left out, and later ones likewise. run/checkpoint is complete up to update 5." in said
