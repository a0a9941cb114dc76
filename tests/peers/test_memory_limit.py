"""A stage that would take more memory than its machine allows ends the run, by the machine's name and the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.told_run import hosted

TOO_MUCH = 2**33

SWELLS = f"""
import torch
from roundelay.frontend.stages.stage_function import StageFunction
forward = StageFunction.forward

def swelling(*given, **named):
    torch.empty({TOO_MUCH}, dtype=torch.uint8)  # never written to: without a limit there is room for it
    return forward(*given, **named)

StageFunction.forward = swelling
"""
"""As a graph would whose sizes are computed: nothing that the host has sent says how large the tensor is."""


@pytest.mark.timeout(300)
def test_a_stage_that_grows_beyond_the_limit_is_told_on_every_machine(tmp_path: Path) -> None:
    with hosted(tmp_path, 50, 2) as run:
        run.joiners.append(run.join(run.invitations[0], "joiner", SWELLS, "--memory-limit", str(2**26)))
        assert run.end() == [1, 1], run.told()
    for name in ("host", "joiner"):
        (line,) = [line for line in run.told(name).splitlines() if line.startswith("lost: ")]
        assert line.startswith("lost: worker-1: "), line
        assert f"can't allocate memory: you tried to allocate {TOO_MUCH} bytes" in line
        assert "Traceback" not in run.told(name)
