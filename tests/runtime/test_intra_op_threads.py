"""Workers compute with as many intra-op threads as their plan says, and to the same bits wherever they do."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundelay
from roundelay import Job
from roundelay.cores import all_threads, num_cores, threads_each, usable_cores
from roundelay.env import MALLOC
from roundelay.errors import PlanError, RunError, UsageError
from roundelay.launching.forked_call import isolated
from roundelay.runtime.processes.child_process import fork
from roundelay.runtime.processes.determinism import deterministic, use_threads
from roundelay.runtime.processes.idle_resources import end_idle_threads
from roundelay.session.training import Session

ROOT = Path(__file__).parents[2]


class ByIndex(nn.Module):
    """Rows of a parameter by index, whose gradient is added up by index."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(20, 64))
        self.inner, self.last = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """Of (N, L) indices: (N, 4)."""
        out: torch.Tensor = self.last(torch.relu(self.inner(self.rows[index].mean(1))))
        return out


class Attending(nn.Module):
    """Two layers with attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 64)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2)])
        self.last = nn.Linear(64, 4)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """Of (N, L) indices: (N, 4)."""
        x = self.embedding(index)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.last(x.mean(1))
        return out


def convolution() -> nn.Module:
    """Of (N, 64) indices: (N, 4)."""
    first = nn.Embedding(20, 8), nn.Flatten(), nn.Unflatten(1, (8, 8, 8)), nn.Conv2d(8, 32, 3, padding=1)
    last = nn.Conv2d(32, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    return nn.Sequential(*first, nn.BatchNorm2d(32), nn.ReLU(), *last)


MODELS = {"by index": ByIndex, "attention": Attending, "convolution": convolution}


def job(name: str) -> Job:
    """Of one of the models, on fixed data."""
    torch.manual_seed(0)
    data = [(torch.randint(20, (32, 64)), torch.randint(4, (32,))) for _ in range(4)]
    return Job(
        model=MODELS[name](),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3, fused=True),
    )


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
@pytest.mark.parametrize("model", MODELS)
def test_a_run_on_several_threads_is_bit_equal_to_plain_pytorch_and_to_its_reference(
    model: str, transport: str
) -> None:
    made = job(model)
    result = roundelay.verify(made, workers=2, threads=2, transport=transport, micro_batches=2, steps=3)
    assert result.equal
    assert result.fidelity is not None
    assert (result.fidelity.exact, result.fidelity.unchecked) == (True, "")
    assert [report["threads"] for report in result.workers.values()] == [2, 2]


def test_workers_of_different_numbers_of_threads_compute_what_the_reference_does() -> None:
    made = job("attention")
    plan = roundelay.plan(made, workers=2, micro_batches=2)
    uneven = with_threads(plan, (1, 2))
    result = roundelay.verify(made, plan=uneven, steps=3)
    assert result.equal
    assert [report["threads"] for _, report in sorted(result.workers.items())] == [1, 2]


@pytest.mark.parametrize("counts", [(1, 2), (2, 1)])
def test_workers_of_one_process_compute_each_on_its_own_number(counts: tuple[int, int], tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    def loss(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with seen.open("a") as file:
            file.write(f"{threading.current_thread().name} {torch.get_num_threads()}\n")
        return F.cross_entropy(outputs, batch[1])

    made = dataclasses.replace(job("attention"), loss=loss)
    plan = with_threads(roundelay.plan(made, workers=2, cuts="equal", micro_batches=2), counts)
    roundelay.train(made, plan=plan, steps=20, check="off")
    in_the_run = [line.split()[-1] for line in seen.read_text().splitlines() if line.startswith("roundelay")]
    assert in_the_run == [str(counts[1])] * 40  # on two threads, each of which computes for either worker


@pytest.mark.parametrize("counts", [(1, 2), (2, 1)])
def test_an_evaluation_is_computed_with_as_many_as_the_first_worker_has(counts: tuple[int, int]) -> None:
    seen = []
    made = dataclasses.replace(job("attention"), evaluate=lambda model: seen.append(torch.get_num_threads()) or {})
    plan = with_threads(roundelay.plan(made, workers=2, cuts="equal", micro_batches=2), counts)
    roundelay.train(made, plan=plan, steps=3, check="off")
    assert set(seen) == {counts[0]}


def with_threads(plan: roundelay.Plan, counts: Sequence[int]) -> roundelay.Plan:
    """The plan with these numbers of threads of its workers."""
    workers = [dataclasses.replace(worker, threads=n) for worker, n in zip(plan.workers, counts, strict=True)]
    return dataclasses.replace(plan, workers=tuple(workers))


def test_gradients_by_index_are_added_in_one_order() -> None:
    def gradient() -> torch.Tensor:
        rows = nn.Parameter(torch.ones(3, 512))
        torch.manual_seed(0)
        weights, index = torch.randn(1024, 8, 512), torch.randint(3, (1024, 8))
        (rows[index] * weights).sum().backward()
        assert rows.grad is not None
        return rows.grad

    before = torch.get_num_threads()
    use_threads(2)
    try:
        with deterministic(False, threads=2):
            assert all(torch.equal(gradient(), gradient()) for _ in range(5))
    finally:
        use_threads(before)


def test_what_was_asked_for_strictly_stays_so_within() -> None:
    with deterministic(True), deterministic(False, threads=2):
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    with deterministic(False, threads=2):
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_child_computes_on_several_threads_after_its_parent_has() -> None:
    before = torch.get_num_threads()
    use_threads(2)
    try:
        square = torch.randn(512, 512)
        (square @ square).sum()
        rows = isolated(
            lambda: [torch.get_num_threads(), float((square @ square).isfinite().all())], "a product", limit_s=60
        )
        assert rows == [2, 1.0]
    finally:
        use_threads(before)


def test_a_child_ends_with_1_if_its_work_raises() -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(fork(lambda: 1 / 0), 0)[1]) == 1  # type: ignore[arg-type, return-value]


def test_a_worker_s_threads_are_the_host_s_cores_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("ROUNDELAY_CORES", "16")
    each = {workers: threads_each(workers, torch.get_num_threads) for workers in (1, 2, 3, 32)}
    assert each == {1: 16, 2: 8, 3: 5, 32: 1}
    assert {worker.threads for worker in roundelay.plan(job("attention"), workers=2).workers} == {8}


def test_what_the_person_has_set_is_shared_and_what_a_launcher_has_set_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_CORES", "16")
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert (all_threads(lambda: 6), threads_each(2, lambda: 6)) == (6, 3)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert threads_each(4, lambda: 6) == 6  # each process of a launcher has what was set
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a script's own word, unless torchrun starts the processes
    assert threads_each(4, lambda: 1) == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    assert (all_threads(lambda: 1), threads_each(4, lambda: 1)) == (16, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert threads_each(4, lambda: 1) == 8


def test_a_process_that_has_a_host_of_its_own_has_all_of_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("ROUNDELAY_CORES", "16")
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0"}.items():  # as in Kubernetes
        monkeypatch.setenv(name, value)
    assert threads_each(4, lambda: 16) == 16


def test_what_slurm_gives_each_task_is_not_divided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("ROUNDELAY_CORES", "16")
    for name, value in {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1"}.items():
        monkeypatch.setenv(name, value)
    assert threads_each(4, lambda: 16) == 4
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    assert threads_each(4, lambda: 16) == 8
    monkeypatch.setenv("ROUNDELAY_CORES", "6")  # it counts processors
    assert threads_each(4, lambda: 6) == 6


def test_the_last_word_on_threads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert all_threads(lambda: 3) == 3  # torch.set_num_threads(3), after torch had read 6


def test_a_training_leaves_torch_s_settings_as_they_were() -> None:
    made = dataclasses.replace(job("by index"), evaluate=lambda model: {"one": 1.0})
    threads = torch.get_num_threads()
    roundelay.train(made, workers=2, threads=2, epochs=2, check="off")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.get_num_threads() == threads


def test_two_processors_of_one_core_count_once(tmp_path: Path) -> None:
    for processor, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert num_cores(frozenset(range(4)), tmp_path) == 2
    assert num_cores(frozenset({0, 2}), tmp_path) == 1
    assert num_cores(frozenset({0, 7}), tmp_path) == 2  # of which the kernel says nothing


def test_a_declared_number_of_cores_counts_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_CORES", "12")
    assert usable_cores() == 12
    for wrong in ("", "0", "two", "-1", "1.5"):
        monkeypatch.setenv("ROUNDELAY_CORES", wrong)
        with pytest.raises(UsageError, match="ROUNDELAY_CORES"):
            usable_cores()


@pytest.mark.parametrize("count", [0, -1, 1025, True, "2"])
def test_a_wrong_number_of_threads_is_refused(count: object) -> None:
    with pytest.raises(PlanError, match="threads"):
        roundelay.plan(job("by index"), workers=1, threads=count)


def test_no_answer_from_plain_pytorch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = job("by index")
    monkeypatch.setattr("roundelay.proof.fidelity.run_plain", lambda case, shared: os._exit(3))
    with pytest.raises(RunError, match="ended without an answer"):
        roundelay.verify(made, workers=1, steps=1)
    with pytest.raises(RunError, match="ended without an answer"):
        roundelay.train(made, workers=1, steps=1, check="full")


def _weights(folder: Path, model: str) -> dict[str, torch.Tensor]:
    """Those of the last checkpoint of a run."""
    trained = MODELS[model]()
    roundelay.load(trained, folder / "checkpoint")
    return trained.state_dict()


SCRIPT = """
import torch
torch.randn(600, 600) @ torch.randn(600, 600)
from tests.runtime.test_intra_op_threads import job as made
def job(seed): return made({model!r})
"""


@pytest.mark.parametrize("model", MODELS)
def test_processes_of_a_launcher_compute_what_threads_do(model: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT.format(model=model))
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "ROUNDELAY_CORES": "4", "ROUNDELAY_CACHE": "none"}
    command = ["-m", "roundelay", "train", "job.py", "--steps", "3", "--micro-batches", "2", "--cuts", "equal"]
    launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *command]
    runs = {"launched": launched, "here": [sys.executable, *command, "--workers", "2"]}
    for name, line in runs.items():
        done = subprocess.run([*line, "--out", name], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    ends = [_weights(tmp_path / name, model) for name in runs]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    for name in runs:
        assert "threads = 2" in (tmp_path / name / "plan.toml").read_text()


AS_SET = """
import sys, torch
own = torch.get_num_threads()
from roundelay.cli import main
sys.argv = ["roundelay", "plan", "job.py", "--workers", "1", "--cuts", "equal", "--output", "plan.toml"]
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
print(own, code, file=sys.stderr)
"""


def test_the_command_computes_on_what_torch_would_use_by_itself(tmp_path: Path) -> None:
    bare = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "ROUNDELAY_CORES")}
    (tmp_path / "job.py").write_text((ROOT / "tests" / "cli" / "jobs" / "mlp.py").read_text())
    for program in (AS_SET, AS_SET.replace("import sys, torch", "import sys").replace("torch.get_num_threads()", "0")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=bare | {"PYTHONPATH": str(ROOT / "src"), "ROUNDELAY_MALLOC": "keep"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        own, code = map(int, done.stderr.split()[-2:])
        assert code == 0, done.stderr
        (planned,) = re.findall(r"^threads = (\d+)$", (tmp_path / "plan.toml").read_text(), re.MULTILINE)
        assert int(planned) == min(usable_cores_undeclared(), own or usable_cores_undeclared())


def usable_cores_undeclared() -> int:
    """What this machine has, whatever the tests declare."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ROUNDELAY_CORES", raising=False)
        return usable_cores()


def test_threads_made_after_a_run_compute_on_as_many_as_before() -> None:
    seen: list[int] = []
    with undone_threads(2):
        roundelay.train(job("by index"), workers=2, steps=2, threads=1, check="off")
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert torch.get_num_threads() == 2
    assert seen == [2]


@contextmanager
def undone_threads(count: int) -> Iterator[None]:
    """This thread computes with so many within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_no_team_waits_while_workers_compute() -> None:
    with undone_threads(2):
        torch.randn(512, 512) @ torch.randn(512, 512)
        team = len(os.listdir("/proc/self/task"))
        end_idle_threads()
        assert len(os.listdir("/proc/self/task")) == team - 1
        torch.randn(512, 512) @ torch.randn(512, 512)
        assert len(os.listdir("/proc/self/task")) == team


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")
def test_a_run_on_threads_begins_without_the_team_of_the_thread_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    team: set[str] = set()
    left: list[set[str]] = []
    made, task_of = job("by index"), Session._task

    def with_a_team(self: Session, *args: Any, **kwargs: Any) -> Any:
        task = task_of(self, *args, **kwargs)
        end_idle_threads()
        before = {*os.listdir("/proc/self/task")}
        with undone_threads(2):
            torch.randn(512, 512) @ torch.randn(512, 512)
        team.update({*os.listdir("/proc/self/task")} - before)
        return task

    def loss(outputs: torch.Tensor, batch: object) -> torch.Tensor:
        left.append(team & {*os.listdir("/proc/self/task")})
        return made.loss(outputs, batch)  # type: ignore[no-any-return]

    monkeypatch.setattr(Session, "_task", with_a_team)
    chosen: dict[str, Any] = {"workers": 2, "threads": 1, "cuts": "equal", "check": "off"}
    roundelay.train(dataclasses.replace(made, loss=loss), steps=2, **chosen)
    assert len(team) == 1
    assert left[-1] == set()


FREED = """
import torch
from pathlib import Path
from roundelay.runtime.processes.idle_resources import give_back_idle
own = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
blocks = [torch.ones(1 << 18) for _ in range(256)]
del blocks
kept = own()
give_back_idle()
print(kept - own())
"""


def test_free_memory_of_planning_is_given_back_before_workers_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREED],
        env=os.environ | MALLOC | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert int(done.stdout) >= 200  # of 256 MiB
