"""Prove that a checkpoint in mid-flight that a commit has written is continued here, bit for bit: one minute.

    python -m tests.same_bits.checkpoint [--against COMMIT]

The source of the commit trains a small model under every case to the end, and again until an error strikes; the source
of this tree goes on from the checkpoint that was written last. It must not start with empty stages, and its last
weights must have the bits of the run that was never interrupted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.same_bits.__main__ import BASE
from tests.same_bits.sides import ROOT, worktree

STEPS, EVERY, STRUCK, TRIES = 12, 5, 7, 20
CASES: dict[str, dict[str, Any]] = {
    "pipeoptim": {"rule": "pipeoptim", "micro_batches": 2},
    "pipeoptim, stash, clip, ema": {"rule": "pipeoptim", "backward": "stash", "clip": "previous:0.5", "ema": 0.9},
    "pipedream, bf16": {"rule": "pipedream", "precision": "bf16"},
    "pipedream, fp16": {"rule": "pipedream", "precision": "fp16", "loss_scale": "dynamic:1024:3"},
    "pipedream-vertical": {"rule": "pipedream-vertical"},
    "pipedream-2bw": {"rule": "pipedream-2bw", "micro_batches": 3},
    "spectrain": {"rule": "spectrain"},
    "rehearse": {"rule": "rehearse", "micro_batches": 3},
    "lookahead": {"rule": "lookahead"},
    "async": {"rule": "async", "clip": "stage:0.1"},
    "cdp-v2": {"rule": "cdp-v2", "micro_batches": 3},
    "two replicas": {"rule": "pipeoptim", "data_parallel": 2, "transport": "shm"},
    "ZeRO-1": {"rule": "pipedream-2bw", "data_parallel": 2, "zero": 1, "micro_batches": 3},
    "tensor parallel": {"rule": "pipedream", "tensor_parallel": 2},
    "dp": {"rule": "cdp-v2", "layout": "dp", "micro_batches": 3, "stages": 3},
    "mp": {"rule": "cdp-v1", "layout": "mp", "micro_batches": 3, "stages": 3},
    "zero": {"rule": "cdp-v1", "layout": "zero", "micro_batches": 3, "stages": 3},
    "1f1b, global clip": {"rule": "1f1b", "micro_batches": 2, "clip": "global:0.1"},
}


def job() -> Any:
    """A perceptron with dropout, and a BatchNorm, which has buffers."""
    import torch

    import roundelay

    torch.manual_seed(7)
    layers = [torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Dropout(0.2)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def batches(epoch: int) -> Iterator[Any]:
        chance = torch.Generator().manual_seed(epoch)
        for _ in range(4):
            yield torch.randn(12, 6, generator=chance), torch.randint(3, (12,), generator=chance)

    def adam(named: Any) -> Any:
        return torch.optim.Adam([weight for _, weight in named], lr=0.01)

    def loss(outputs: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    return roundelay.Job(model=model, loss=loss, optimizer=adam, batches=batches)


class Struck(Exception):
    """Ends a run."""


def write(folder: Path) -> None:
    """The side that writes: of each case a plan, a checkpoint, and the weights of a whole run."""
    from safetensors.torch import save_file

    import roundelay

    def strike(update: Any) -> None:
        if update.update == STRUCK:
            raise Struck

    for number, choices in enumerate(CASES.values()):
        place = folder / str(number)
        place.mkdir()
        workers = {} if "layout" in choices else {"workers": 3 if "data_parallel" not in choices else 2}
        plan = roundelay.plan(job(), cuts="equal", **workers, **choices)
        (place / "plan.toml").write_text(plan.text())
        whole = job()
        roundelay.train(whole, plan=plan, steps=STEPS, check="off")
        save_file(dict(whole.model.state_dict()), place / "whole.safetensors")
        kept = {"save_to": place / "checkpoint", "checkpoint_every": EVERY, "on_update": strike}
        for _ in range(TRIES):
            try:
                roundelay.train(job(), plan=plan, steps=STEPS, check="off", **kept)
            except roundelay.RoundelayError:
                pass
            else:
                raise SystemExit(f"case {number} was not struck")
            if any((place / "checkpoint").glob("checkpoint.json")):  # else the error was faster than the disk
                break


def go_on(folder: Path) -> None:
    """The side that goes on; prints a line for each case, and exits with 1 if one has other bits."""
    import torch
    from safetensors.torch import load_file

    import roundelay

    warnings.simplefilter("error", roundelay.PlanWarning)  # that stages start empty, for one
    failed = False
    for number, name in enumerate(CASES):
        place, rest = folder / str(number), job()
        plan = roundelay.Plan.parse((place / "plan.toml").read_text())
        done = roundelay.train(rest, plan=plan, resume=place / "checkpoint", check="off")
        whole, first = load_file(place / "whole.safetensors"), done.updates[0].update
        equal = all(torch.equal(whole[key], value) for key, value in rest.model.state_dict().items())
        failed = failed or not equal or not first
        sys.stdout.write(f"{'equal' if equal else 'DIFFERENT'}: {name}, from update {first} to {STEPS}\n")
    sys.exit(failed)


def main() -> int:
    """Let the commit write, and this tree go on; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.same_bits.checkpoint", description=__doc__)
    parser.add_argument("--against", default=BASE, metavar="COMMIT", help=f"whose source writes; default: {BASE}")
    against = parser.parse_args().against
    with worktree(against) as tree, tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        for side, source in (("write", tree / "src"), ("go_on", ROOT / "src")):
            path = os.pathsep.join([str(source), str(ROOT)])
            env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ROUNDELAY_RUNS": "none"}
            code = f"from pathlib import Path; from tests.same_bits.checkpoint import {side}; {side}(Path({folder!r}))"
            ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, check=False)
            if ended.returncode:
                return ended.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
