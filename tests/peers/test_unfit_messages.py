"""A machine that sends other tensors than its stage makes is named by every machine of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.told_run import hosted

HALF = """
import roundelay.runtime.handlers as handlers
from roundelay.transport.endpoint import Message

class Half:
    sent = 0

    def __call__(self, channel, header, values):
        Half.sent += 1
        if Half.sent > 20:
            values = tuple(v[:1] if hasattr(v, "shape") else v for v in values)
        return Message(channel, header, values)

handlers.Message = Half()
"""
"""After twenty messages, tensors of one row."""


@pytest.mark.timeout(300)
def test_other_tensors_than_the_plan_s_are_told_on_every_machine_by_their_sender(tmp_path: Path) -> None:
    with hosted(tmp_path, 10_000) as run:
        for k, invitation in enumerate(run.invitations, 1):
            run.joiners.append(run.join(invitation, f"joiner {k}", HALF if k == 2 else ""))
        assert run.end() == [1, 1, 1], run.told()
    for name in ("host", "joiner 1"):
        (line,) = [line for line in run.told(name).splitlines() if line.startswith("lost: ")]
        assert line.startswith("lost: worker-2: it sent a message on channel "), line
        assert "a tensor of float32 (1, 64), where a tensor of float32 (32, 64) was sent" in line
        assert "Traceback" not in run.told(name)
