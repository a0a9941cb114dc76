"""``roundelay host`` and ``roundelay join`` on one machine: who trains what, what is proved, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from roundelay.cli.app import app
from roundelay.ir.plan import Plan
from roundelay.trust.invitation import Invitation
from tests.cli.harness import MLP, Said, finish, job_file, one_screen, start
from tests.cli.harness import here as typed
from tests.conftest import nothing_left_behind
from tests.peers.hosted import hosting, joining

STEPS = 40

HOST = get_command(app).commands["host"]  # type: ignore[attr-defined]
SHOWN = {"rule": "", "micro_batches": "", "precision": "", "clip": "", "deadline_s": "g"}
"""Choices whose help says one value by default, and how it is written."""


def test_three_machines_train_and_the_run_is_proved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with nothing_left_behind():
        run = hosting(tmp_path, MLP, "--out", "shared", "--steps", STEPS, "--checkpoint-every", 10, "--json")
        joined = [run.join(number) for number in range(2)]
        host, *others = run.ended(joined)
    assert host.code == 0, host.err
    assert [one.code for one in others] == [0, 0], others
    assert host.json["steps"] == STEPS
    lines = [json.loads(line) for line in (tmp_path / "shared" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["loss"] for line in lines[-9:]) < sum(line["loss"] for line in lines[:9])
    for worker in (1, 2):
        assert f"worker-{worker} has joined" in host.err
        assert f"Joined run {run_of(run.invitations[0])} as worker-" in others[worker - 1].err
    plan = Plan.parse((tmp_path / "shared" / "plan.toml").read_text())
    assert (plan.rule, plan.transport, plan.num_workers) == ("ravnest", "grpc", 3)
    assert plan.edges[0].bytes_per_s > 0, "as measured"
    assert {name: told(name) for name in SHOWN} == {name: f"{getattr(plan, name):{SHOWN[name]}}" for name in SHOWN}
    assert f"over {plan.transport} " in str(HOST.help)
    assert (tmp_path / "shared" / "refused.jsonl").read_text() == ""
    said = typed(capsys, "verify", MLP, "--trace", tmp_path / "shared")
    assert said.code == 0, said.err
    assert f"trace = replay: bit-equal: {3 * 2 * STEPS} letters, 0 of " in said.out
    again = typed(capsys, "verify", MLP, "--trace", tmp_path / "shared", "--from", tmp_path / "shared" / "checkpoint")
    assert (again.code, "0 of " in again.out) == (0, True) or "no digest" in again.told


@pytest.mark.parametrize("rule", ["1f1b", "pipeoptim", "zb-h1", "zb-v"])
def test_other_rules_end_with_the_weights_that_they_have_on_one_machine(rule: str, tmp_path: Path) -> None:
    with nothing_left_behind():
        run = hosting(tmp_path, MLP, "--out", "shared", "--steps", 8, "--rule", rule, "--json", peers=2)
        host, other = run.ended([run.join(0)])
    assert (host.code, other.code) == (0, 0), host.err + other.err
    alone = finish(
        start(tmp_path, "train", MLP, "--plan", "shared/plan.toml", "--steps", 8, "--out", "alone", "--json")
    )
    assert alone.code == 0, alone.err
    assert json.loads(alone.out)["digest_end"] == host.json["digest_end"]


def told(name: str) -> str:
    """What the help says that a choice is by default."""
    option = next(one for one in HOST.params if one.name == name)
    return re.search(r"\[default: ([^;\]]+)", option.help)[1]  # type: ignore[index]


def test_a_run_that_is_continued_keeps_its_rule_and_is_planned_for_other_machines(tmp_path: Path) -> None:
    with nothing_left_behind():
        first = hosting(tmp_path, MLP, "--out", "first", "--steps", 4, "--rule", "1f1b", peers=2)
        assert [said.code for said in first.ended([first.join(0)])] == [0, 0]
        again = hosting(tmp_path, MLP, "--out", "again", "--from", "first", "--steps", 8, peers=2)
        assert [said.code for said in again.ended([again.join(0)])] == [0, 0], again.log.read_text()
        more = hosting(tmp_path, MLP, "--out", "more", "--from", "again", "--steps", 4)
        assert [said.code for said in more.ended([more.join(0), more.join(1)])] == [0, 0, 0], more.log.read_text()
    first, second, third = (Plan.parse((tmp_path / k / "plan.toml").read_text()) for k in ("first", "again", "more"))
    assert [plan.num_workers for plan in (first, second, third)] == [2, 2, 3]
    assert {(plan.rule, plan.micro_batches) for plan in (first, second, third)} == {("1f1b", first.micro_batches)}
    assert all(edge.bytes_per_s > 0 for edge in third.edges), "planned for the machines that are here now"


def run_of(invitation: str) -> str:
    return Invitation.parse(invitation).run


# --- refused before anybody joins


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("optimizer=lambda named: Own(named)", ("Job(optimizer=...), Own", "no Python")),
        (
            "scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), evaluate=lambda m: {}",
            ("ReduceLROnPlateau",),
        ),
        (
            "scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)",
            ("run of unknown length", "Give --steps"),
        ),
    ],
    ids=["optimizer", "scheduler", "length"],
)
def test_what_cannot_travel_is_refused_by_name_before_the_door_opens(
    changes: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    own = "class Own(torch.optim.SGD):\n    def __init__(self, named):\n        super().__init__(named, lr=0.1)\n"
    said = finish(start(tmp_path, "host", job_file(tmp_path, changes, own), "--peers", 2, "--out", "r"))
    one_screen(said, *words)
    assert "roundelay join" not in said.err


def test_more_machines_than_stages_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = typed(capsys, "host", MLP, "--peers", 30, "--out", tmp_path / "r")
    assert said.code == 2
    assert "roundelay join" not in said.err


@pytest.mark.parametrize("wrong", ["everywhere", "0.0.0.0", "127.0.0.1:99999", "10.0.0.1:x"])
def test_an_address_that_is_none_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    one_screen(typed(capsys, "host", MLP, "--peers", 2, "--listen", wrong), "--listen", "ip -brief address")


# --- refused at the door, or behind it


def test_an_invitation_is_good_once_and_whoever_has_too_little_memory_is_refused(tmp_path: Path) -> None:
    with nothing_left_behind():
        run = hosting(tmp_path, MLP, "--out", "shared", "--steps", 8)
        first = run.join(0)
        wait_for(run.log, "worker-1 has joined")
        twice = joined_and_ended(tmp_path, run.invitations[0])
        assert twice.code == 2
        one_screen(twice, "invitation already used")
        garbage = joined_and_ended(tmp_path, run.invitations[1][:-9])
        assert garbage.code == 2
        one_screen(garbage, "cut off", "Copy the whole line again")
        host, one, two = run.ended([first, run.join(1)])
    assert (host.code, one.code, two.code) == (0, 0, 0)
    refused = [json.loads(line) for line in (tmp_path / "shared" / "refused.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in refused] == ["invitation already used"]


def test_a_machine_without_the_memory_for_its_part_is_refused_by_name(tmp_path: Path) -> None:
    with nothing_left_behind():
        run = hosting(tmp_path, MLP, "--out", "shared", "--steps", 8, peers=2)
        host, other = run.ended([run.join(0, "--memory-limit", 2000)])
    one_screen(other, "memory for this machine's part", "at most 2,000")
    one_screen(host, "worker-1", "memory for this machine's part", "at most 2,000")
    assert (host.code, other.code) == (2, 2)


def test_the_place_of_a_machine_that_leaves_is_offered_anew(tmp_path: Path) -> None:
    with nothing_left_behind():
        run = hosting(tmp_path, MLP, "--out", "shared", "--steps", 20, "--json")
        leaves = run.join(0)
        wait_for(run.log, "worker-1: ")
        os.kill(leaves.pid, signal.SIGKILL)
        leaves.communicate()
        run.invited(3)
        used = joined_and_ended(tmp_path, run.invitations[0])
        one_screen(used, "seat revoked")
        host, *others = run.ended([run.join(1), run.join(2)])
    assert [said.code for said in (host, *others)] == [0, 0, 0], host.err
    assert "worker-1 does not take part: it has left" in host.err
    assert "as worker-1b" in others[1].err
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "shared" / "refused.jsonl").read_text().splitlines()]
    assert reasons == ["seat revoked"]


def test_not_all_come_and_the_host_ends_and_tells_who_waits(tmp_path: Path) -> None:
    with nothing_left_behind():
        run = hosting(tmp_path, MLP, "--out", "shared", "--wait-s", 12)
        host, waiting = run.ended([run.join(0)])
    one_screen(host, "1 of 2 within 12 s, without worker-2", "--wait-s")
    assert host.code == 1
    one_screen(waiting, "it has ended before the run began")
    assert waiting.code == 1
    assert not (tmp_path / "shared").exists()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this machine has one arithmetic: no AVX2"
)
def test_another_arithmetic_is_refused_by_name_and_the_same_on_both_sides_agrees(tmp_path: Path) -> None:
    with nothing_left_behind():
        run = hosting(tmp_path, MLP, "--out", "mixed", "--steps", 8, peers=2)
        refused = finish(run.join(0, "--arithmetic", "sse"))
        one_screen(refused, "another arithmetic", "--arithmetic")
        run.invited(2)
        host, other = run.ended([run.join(1)])
        assert (host.code, refused.code, other.code) == (0, 2, 0), host.err + other.err
        assert "worker-1 does not take part: another arithmetic" in host.err
        lines = [json.loads(line) for line in (tmp_path / "mixed" / "refused.jsonl").read_text().splitlines()]
        assert [(line["peer"], line["reason"]) for line in lines] == [("worker-1", "another arithmetic")]
        run = hosting(tmp_path, MLP, "--out", "same", "--steps", 8, "--arithmetic", "sse", peers=2)
        host, other = run.ended([run.join(0, "--arithmetic", "sse")])
    assert (host.code, other.code) == (0, 0), host.err + other.err


def joined_and_ended(folder: Path, invitation: str) -> Said:
    return finish(joining(folder, invitation))


def wait_for(log: Path, words: str) -> None:
    until = time.monotonic() + 60
    while words not in log.read_text():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
