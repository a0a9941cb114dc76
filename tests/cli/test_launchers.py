"""Other launchers than torchrun: their processes are one training, or are told why not; N whole ones they never are."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import roundelay
from roundelay import detect_launcher
from roundelay.detect_launcher import Launched
from roundelay.doctor import examine
from roundelay.errors import UsageError
from roundelay.launching.rendezvous_store import check_interface, open_store
from tests.api.jobs import make
from tests.cli.harness import MLP, environment, finish, start
from tests.doctor.machines import spoiled

MET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
TORCHRUN_S = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def variables(launcher: str, rank: int, size: int) -> dict[str, str]:
    """What a launcher gives one of its processes, all on one host."""
    return {
        "env": {"RANK": f"{rank}", "WORLD_SIZE": f"{size}"},
        "slurm": {"SLURM_PROCID": f"{rank}", "SLURM_STEP_NUM_TASKS": f"{size}", "SLURM_LOCALID": f"{rank}"}
        | {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": f"{size}"},
        "openmpi": {"OMPI_COMM_WORLD_RANK": f"{rank}", "OMPI_COMM_WORLD_SIZE": f"{size}"}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": f"{rank}", "OMPI_COMM_WORLD_LOCAL_SIZE": f"{size}"},
        "mpich": {"PMI_RANK": f"{rank}", "PMI_SIZE": f"{size}", "MPI_LOCALRANKID": f"{rank}"},
    }[launcher]


@pytest.mark.parametrize("launcher", ["env", "slurm"])
def test_processes_of_another_launcher_are_the_workers_of_one_run(workplace: Path, launcher: str) -> None:
    port = str(free_port())
    options = ("train", MLP, "--no-baseline", "--steps", 3, "--out", "run", "--rule", "1f1b")
    processes = [
        start(
            workplace,
            *options,
            **variables(launcher, rank, 2),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in (1, 0)
    ]
    said = [finish(process) for process in processes]
    assert [one.code for one in said] == [0, 0], said
    summary = json.loads((workplace / "run" / "summary.json").read_text())
    assert (summary["workers"], summary["transport"], summary["steps"]) == (2, "gloo", 3)
    assert not (workplace / "runs").exists()
    assert said[0].out == ""  # the leader shows, and it alone


def test_torchrun_with_a_master_address_works_though_it_keeps_no_store(workplace: Path) -> None:
    launcher = ["--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port"]
    command = ["train", MLP, "--no-baseline", "--steps", "2", "--out", "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher, str(free_port()), "-m", "roundelay", *command],
        cwd=workplace,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said = finish(process)
    assert said.code == 0, said.err
    assert json.loads((workplace / "run" / "summary.json").read_text())["workers"] == 2


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("env", ("RANK and WORLD_SIZE", "MASTER_ADDR", "torchrun --nproc-per-node", "env -u RANK")),
        ("slurm", ("srun (Slurm)", "export MASTER_ADDR=$(scontrol show hostnames", "MASTER_PORT=29500")),
        ("openmpi", ("mpirun (Open MPI)", "mpirun -x MASTER_ADDR=HOST")),
        ("mpich", ("mpiexec", "-genv MASTER_ADDR HOST")),
    ],
)
def test_without_a_place_to_meet_they_are_refused_with_the_line_to_type(launcher: str, words: tuple[str, ...]) -> None:
    now = variables(launcher, 1, 4)
    assert detect_launcher.is_launched(now)
    assert detect_launcher.rank_of(now) == "1"
    for incomplete in (now, now | {"MASTER_ADDR": "h"}, now | {"MASTER_PORT": "1"}):
        with pytest.raises(UsageError) as told:
            detect_launcher.launched(incomplete)
        for word in words:
            assert word in str(told.value)
        assert "process 1 of 4" in told.value.got


def test_the_refusal_is_one_screen_of_every_process_and_nothing_is_trained(workplace: Path) -> None:
    processes = [start(workplace, "train", MLP, **variables("slurm", rank, 2)) for rank in (0, 1)]
    for refused in map(finish, processes):
        assert refused.code == 2
        assert refused.err.count("srun (Slurm)") == 1
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize(
    "left_over",
    [
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},  # sbatch's script, salloc's shell
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", **MET},
        {"RANK": "0"},
        {"WORLD_SIZE": "4"},
        {"LOCAL_RANK": "0", **MET},
        {"RANK": "0", "WORLD_SIZE": "many"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
    ids=str,
)
def test_what_is_left_over_in_a_shell_does_not_hinder(left_over: Mapping[str, str]) -> None:
    assert not detect_launcher.is_launched(left_over)
    assert detect_launcher.launched(left_over) is None
    assert detect_launcher.rank_of(left_over) is None


@pytest.mark.parametrize(
    ("now", "hosts"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", **MET}, 1),
        ({"RANK": "3", "WORLD_SIZE": "4", **MET, "MASTER_ADDR": "10.0.0.1"}, 4),  # Kubernetes
        ({"RANK": "3", "WORLD_SIZE": "4", **MET, "MASTER_ADDR": "10.0.0.1", "LOCAL_SIZE": "2"}, 2),  # DeepSpeed
        ({"RANK": "3", "WORLD_SIZE": "4", **MET, "MASTER_ADDR": "h", **TORCHRUN_S}, 2),
        (
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2"}
            | {"SLURM_LOCALID": "1", **MET, "MASTER_ADDR": "node1"},
            2,
        ),
    ],
)
def test_hosts_are_known_as_far_as_the_launcher_tells(now: dict[str, str], hosts: int) -> None:
    found = detect_launcher.launched(now | {"GLOO_SOCKET_IFNAME": "lo"})
    assert found is not None
    assert found.nodes == hosts
    assert found.opens_store
    assert (found.host == "127.0.0.1") == (found.nodes == 1)


def test_a_number_beyond_their_count_is_refused() -> None:
    with pytest.raises(UsageError, match="process 4 of 4"):
        detect_launcher.launched({"RANK": "4", "WORLD_SIZE": "4", **MET})


def place(**changes: object) -> Launched:
    """Of worker 0 of two, on this host."""
    fields: dict[str, object] = {"rank": 0, "size": 2, "nodes": 1}
    fields |= {"host": "127.0.0.1", "port": free_port(), "run": "0", "restart": 0, "interface": None}
    return Launched(**(fields | {"opens_store": True} | changes))  # type: ignore[arg-type]


def test_the_store_listens_on_loopback_alone() -> None:
    here = place()
    store = open_store(here)
    tcp = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [address for _, address, _, state, *_ in tcp if state == "0A" and address.endswith(f":{here.port:04X}")]
    assert listening == [f"0100007F:{here.port:04X}"]
    del store


def test_a_port_that_somebody_has_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageError, match=f"MASTER_PORT {port} at 127") as told:
            open_store(place(port=port))
    assert "Address already in use" in told.value.got


def test_a_name_without_an_address_is_told() -> None:
    with pytest.raises(UsageError, match=r"MASTER_ADDR no-such-host\.invalid"):
        open_store(place(nodes=2, host="no-such-host.invalid"))


def test_several_hosts_that_meet_at_localhost_meet_at_the_interface() -> None:
    store = open_store(place(nodes=2, host="localhost", interface="lo"))
    del store


def test_an_interface_that_is_not_here_is_told_with_those_that_are() -> None:
    check_interface(place(nodes=2, interface="lo"))
    check_interface(place(nodes=1, interface="eth17"))  # nobody listens there
    with pytest.raises(UsageError, match="GLOO_SOCKET_IFNAME=eth17") as told:
        check_interface(place(nodes=2, interface="eth17"))
    assert "export GLOO_SOCKET_IFNAME=" in told.value.remedy
    others = [name for _, name in socket.if_nameindex() if name != "lo"] or ["there is only lo"]
    assert all(name in told.value.expected for name in others)


def test_the_doctor_names_the_launcher() -> None:
    machine = spoiled(launched=place(launcher="srun (Slurm)", interface="lo"))
    (found,) = (one for one in examine(machine) if one.name == "launcher")
    assert found.found == "srun (Slurm): worker 0 of 2, hosts: 1"


def test_a_program_of_one_s_own_that_a_launcher_starts_several_times_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be meant: a sweep, a task each."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = roundelay.plan(make(), workers=1, rule="1f1b", cuts="equal")
    with pytest.warns(UserWarning, match="worker 1 of a launcher's"):
        assert len(roundelay.train(make(), plan=plan, steps=1).updates) == 1
