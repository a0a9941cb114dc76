"""The digest of a machine's arithmetic: the same in every process of it, another with other instructions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from roundelay.observe.arithmetic import arithmetic
from tests.cli.harness import ROOT

SCRIPT = "from roundelay.observe.arithmetic import arithmetic; print(arithmetic())"


def elsewhere(**env: str) -> str:
    """The digest in a process of its own."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    known = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=known | {"PYTHONPATH": paths} | env,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()


def test_it_is_the_same_in_another_process_with_any_number_of_threads() -> None:
    here = arithmetic()
    assert len(here) == 16
    assert int(here, 16) >= 0
    assert elsewhere(OMP_NUM_THREADS="2", ATEN_CPU_CAPABILITY=torch.backends.cpu.get_cpu_capability().lower()) == here


def test_the_number_of_threads_is_left_as_it_was() -> None:
    arithmetic.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        arithmetic()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_generator_s_state_does_not_matter_and_does_not_change() -> None:
    before = arithmetic()
    arithmetic.cache_clear()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert arithmetic() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_other_instructions_are_another_arithmetic(capability: str) -> None:
    own = torch.backends.cpu.get_cpu_capability().lower()
    if own not in ("avx2", "avx512") or own == capability:
        pytest.skip(f"this machine computes with {own}: {capability} is no other arithmetic that it has")
    assert elsewhere(ATEN_CPU_CAPABILITY=capability) != arithmetic()
