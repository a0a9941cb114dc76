"""Two hosts, each a network namespace, with a cable between them: a run is proved, and a cut cable is told."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundelay.checkpoint.checkpoint import load
from roundelay.checkpoint.stored_files import is_checkpoint
from roundelay.observe.metrics_file import read_metrics
from tests.cli.harness import MLP, environment, here, job_file
from tests.cli.test_torchrun import END_S, SLOW, ending, same_end

Capture = pytest.CaptureFixture[str]
TOLD_S = 15.0
PROVED = ("compared with the one-process reference", "captured = plain PyTorch (", "run = reference: bit-equal")


def ip(*args: str) -> None:
    """Change the system's networks; needs root."""
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them; where they cannot be made, the test fails."""
    names = [f"roundelay{os.getpid()}{side}" for side in "ab"]
    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        ip("-n", names[0], "link", "add", "rl0", "type", "veth", "peer", "name", "rl1", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"rl{i}")
            ip("-n", name, "link", "set", f"rl{i}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


@contextlib.contextmanager
def torchrun(
    folder: Path, hosts: list[str], workers: int, *command: object
) -> Iterator[list[tuple[subprocess.Popen[str], Path]]]:
    """The launchers of both hosts, each with the file into which it prints."""
    with contextlib.ExitStack() as stack:
        started = []
        for i, name in enumerate(hosts):
            launcher = ["--nnodes", "2", "--nproc-per-node", str(workers), "--rdzv-backend", "c10d", "--rdzv-id", "two"]
            launcher += ["--rdzv-endpoint", "10.77.0.1:29511", "--rdzv-conf", f"is_host={'false' if i else 'true'}"]
            launcher += ["--local-addr", f"10.77.0.{i + 1}", "-m", "roundelay", *map(str, command)]
            said = folder / f"said-by-{i}"
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *launcher],
                cwd=folder,
                env=environment(GLOO_SOCKET_IFNAME=f"rl{i}"),
                stdout=stack.enter_context(said.open("w")),
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            stack.enter_context(ending(process))
            started.append((process, said))
        yield started


def ended(launchers: list[tuple[subprocess.Popen[str], Path]]) -> tuple[list[int], list[str]]:
    """Exit codes of the launchers, and what each host has said."""
    return [process.wait(END_S) for process, _ in launchers], [said.read_text() for _, said in launchers]


def test_two_hosts_talk_over_the_interface_that_is_named(workplace: Path, hosts: list[str]) -> None:
    with torchrun(workplace, hosts, 1, "train", MLP, "--steps", 5, "--no-baseline", "--out", "run") as launchers:
        codes, said = ended(launchers)
    assert codes == [0, 0], said
    assert len(read_metrics(workplace / "run" / "metrics.jsonl")) == 5


@pytest.mark.parametrize("zero", [1, 3])
def test_a_run_on_two_hosts_is_proved(workplace: Path, hosts: list[str], zero: int) -> None:
    options = ("--data-parallel", 2, "--rule", "1f1b", "--zero", zero)
    with torchrun(workplace, hosts, 2, "verify", MLP, *options) as launchers:
        codes, said = ended(launchers)
    assert codes == [0, 0], said
    assert f"2 replicas x 2 stages x ZeRO {zero} over gloo" in said[0]
    for line in PROVED:
        assert (said[0].count(line), said[1].count(line)) == (1, 0)


def test_a_broken_run_on_two_hosts_fails_on_both(workplace: Path, hosts: list[str]) -> None:
    """Though the worker that is broken is not the one that tells."""
    with torchrun(workplace, hosts, 1, "verify", MLP, "--rule", "1f1b", "--tamper", "drop-update") as launchers:
        codes, said = ended(launchers)
    assert codes == [1, 1], said
    assert said[0].count("run DIFFERENT from reference after 8 steps: stage 1: ") == 1
    assert "DIFFERENT" not in said[1]


def test_a_cut_cable_is_told_on_both_hosts_and_the_run_goes_on_bit_for_bit(
    capsys: Capture, workplace: Path, hosts: list[str]
) -> None:
    job, run = job_file(workplace, "batches=slow", SLOW), workplace / "run"
    options = ("--data-parallel", 2, "--rule", "1f1b", "--zero", 1, "--no-baseline")
    with torchrun(
        workplace, hosts, 2, "train", job, *options, "--epochs", 1000, "--checkpoint-every", 4, "--out", "run"
    ) as launchers:
        deadline = time.monotonic() + END_S
        while not is_checkpoint(run / "checkpoint"):
            assert time.monotonic() < deadline, [said.read_text() for _, said in launchers]
            time.sleep(0.05)
        ip("-n", hosts[0], "link", "set", "rl0", "down")
        cut = time.monotonic()
        while not all("of the launcher's" in said.read_text() for _, said in launchers):
            assert time.monotonic() - cut < TOLD_S, [said.read_text() for _, said in launchers]
            time.sleep(0.1)
        assert "worker 0 of the launcher's" in launchers[1][1].read_text()
    at = load(run / "checkpoint").position.updates
    assert here(capsys, "train", job, "--from", run, "--steps", 4, "--out", workplace / "rest").code == 0
    whole = ("--plan", run / "plan.toml", "--steps", at + 4, "--no-baseline", "--out", workplace / "whole")
    assert here(capsys, "train", job, *whole).code == 0
    same_end(workplace / "rest", workplace / "whole")
