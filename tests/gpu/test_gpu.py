"""What only a GPU can show; skipped, with the reason, where torch sees none. Most of it runs on a stand-in, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import roundelay
from roundelay.checkpoint.checkpoint import load
from roundelay.runtime.device import AcceleratorDevice
from roundelay.session.training import Length, Session
from roundelay.transport.cuda import Cuda
from tests.api.jobs import make, mlp

JOB = Path(__file__).parent.parent / "cli" / "jobs" / "mlp.py"
COUNT = torch.cuda.device_count()
ONE = pytest.mark.skipif(COUNT < 1, reason="torch sees no CUDA device here")
TWO = pytest.mark.skipif(
    COUNT < 2 or not dist.is_nccl_available(), reason=f"NCCL needs a device for each process, and there are {COUNT}"
)

# a kernel without a deterministic form warns while `verify` runs; it may, what counts is the comparison
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@ONE
@pytest.mark.parametrize("rule", ["1f1b", "pipedream", "pipeoptim"])
def test_two_threads_with_a_stream_each_on_one_device_are_the_reference_bit_for_bit(rule: str) -> None:
    job = make(mlp())
    captured = roundelay.capture(job)
    chosen = roundelay.plan(job, workers=2, rule=rule, captured=captured, devices="cuda:0,cuda:0")
    result = roundelay.verify(job, plan=chosen, steps=8)
    assert result.equal, result.difference


@ONE
@pytest.mark.parametrize("foreach", [False, None])
def test_a_stage_on_the_cpu_and_one_on_the_device_are_the_reference_bit_for_bit(foreach: bool | None) -> None:
    """Also where torch chooses how an optimizer updates: it would by the device."""
    job = make(mlp(), optimizer=lambda named: torch.optim.AdamW(named, lr=0.05, foreach=foreach))
    captured = roundelay.capture(job)
    chosen = roundelay.plan(job, workers=2, captured=captured, devices="cpu,cuda:0")
    result = roundelay.verify(job, plan=chosen, steps=8)
    assert result.equal, result.difference


@ONE
def test_a_checkpoint_of_a_run_on_the_device_continues_on_it_and_on_the_cpu(tmp_path: Path) -> None:
    for devices in ("cuda:0,cuda:0", "cpu"):
        job = make(mlp())
        captured = roundelay.capture(job)
        first = roundelay.plan(job, workers=2, captured=captured, devices="cuda:0,cuda:0")
        roundelay.train(job, plan=first, steps=3, save_to=tmp_path / devices[:3])
        chosen = roundelay.plan(job, workers=2, captured=captured, devices=devices)
        result = roundelay.verify(job, plan=chosen, steps=3, resume=tmp_path / devices[:3])
        assert result.equal, result.difference


@ONE
def test_spans_on_the_device_are_those_of_its_work() -> None:
    job = make(torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)), torch.nn.Linear(6, 3)))
    captured = roundelay.capture(job)
    chosen = roundelay.plan(job, workers=2, captured=captured, devices="cuda:0,cuda:0")
    trained = Session(job, captured, chosen, 0, Length(steps=10)).run(notify=lambda event: None)
    for events in trained.events.values():
        assert all(end >= start > 0 for _, _, _, _, _, start, end, *_ in events)
        starts = [event[5] for event in events if event[0] != "read"]
        assert starts == sorted(starts)


@ONE
def test_a_copy_ahead_overlaps_with_the_work_of_the_worker() -> None:
    """The copy of the next micro-batch has ended on the device before the work that was given before it has."""
    device = AcceleratorDevice(torch.device("cuda", 0), Cuda())
    ahead = torch.cuda.Event()
    rows = torch.zeros(1 << 20)

    def data() -> Any:
        for _ in range(9):
            yield [(None, {"x": rows})]

    with device.active():
        fed: Any = device.feed(data())
        for _ in range(5):  # the memory that the copies need is there, as asking for it may wait for the device
            next(fed)
            torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second of the stream's work
        busy = torch.cuda.Event()
        busy.record(device.stream)  # type: ignore[arg-type]
        next(fed)  # issues the next copy while the stream sleeps
        ahead.record(device._copies)  # type: ignore[arg-type]
        ahead.synchronize()
        assert not busy.query()
        fed.close()
    torch.cuda.synchronize()


class Attention(nn.Module):
    """Causal attention over long sequences, of which torch's fused kernels add in any order unless told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(64, 32), nn.Embedding(1024, 32)
        self.mixed = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.word(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for layer in self.mixed:
            q, k, v = layer(hidden).view(x.shape[0], x.shape[1], 3, 4, 8).permute(2, 0, 3, 1, 4)
            hidden = hidden + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(
                2
            )
        return self.head(hidden)


def attention() -> roundelay.Job:
    torch.manual_seed(0)
    data = [(torch.randint(64, (4, 1024)), torch.randint(64, (4, 1024))) for _ in range(4)]
    return roundelay.Job(
        model=Attention(),
        loss=lambda outputs, batch: functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten()),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    )


@ONE
def test_long_attention_is_proved_from_plain_pytorch_on() -> None:
    result = roundelay.verify(attention(), workers=2, rule="1f1b", steps=3, devices="cuda:0,cuda:0")
    assert result.exit_code == 0, (result.differences(), result.nondeterministic)
    assert result.fidelity is not None
    assert result.fidelity.exact, str(result.fidelity)


@ONE
def test_the_same_training_gives_the_same_bits_twice_if_it_is_asked_to() -> None:
    weights = []
    for _ in range(2):
        job = attention()
        roundelay.train(job, workers=2, rule="pipeoptim", steps=8, devices="cuda:0,cuda:0", deterministic=True)
        weights.append([weight.detach().clone() for weight in job.model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*weights, strict=True))


@ONE
def test_a_recurrent_layer_s_weights_need_no_compacting(capfd: pytest.CaptureFixture[str]) -> None:
    job = make(
        nn.Sequential(nn.LSTM(6, 8, 2, batch_first=True), First(), nn.Linear(8, 3)),
        batches=lambda epoch: [(torch.randn(4, 5, 6), torch.randint(3, (4,))) for _ in range(3)],
    )
    roundelay.train(job, workers=1, rule="1f1b", steps=3, devices="cuda:0", check="off")
    assert "contiguous chunk" not in capfd.readouterr().err


class First(nn.Module):
    """The last step of what a recurrent layer returns."""

    def forward(self, both: Any) -> Any:
        return both[0][:, -1]


@TWO
def test_two_processes_with_a_device_each_over_nccl_are_the_two_threads_bit_for_bit(tmp_path: Path) -> None:
    def run(*command: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-4000:]

    plan = tmp_path / "plan.toml"
    train = ("train", str(JOB), "--steps", "6", "--no-baseline")
    run("roundelay", "plan", str(JOB), "--workers", "2", "--devices", "cuda", "-o", str(plan))
    run("roundelay", *train, "--plan", str(plan), "--out", "threads")
    plan.write_text(plan.read_text().replace('transport = "memory"', 'transport = "nccl"'))
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint")
    run(*torchrun, "127.0.0.1:0", "-m", "roundelay", *train, "--plan", str(plan), "--out", "processes")
    a, b = (load(tmp_path / name / "checkpoint").parameters for name in ("threads", "processes"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@ONE
@pytest.mark.parametrize("rule", ["1f1b", "pipedream"])
def test_half_precision_on_one_device_is_the_reference_bit_for_bit(rule: str) -> None:
    """From a scale that overflows at first."""
    job = make(mlp())
    captured = roundelay.capture(job)
    asked = {"precision": "fp16", "loss_scale": "dynamic:1073741824:3", "devices": "cuda:0,cuda:0"}
    chosen = roundelay.plan(job, workers=2, rule=rule, captured=captured, **asked)
    result = roundelay.verify(job, plan=chosen, steps=16)
    assert result.equal, result.difference
