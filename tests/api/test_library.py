"""The library as a notebook uses it, in a fresh interpreter; and what needs no torch loads none."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import roundelay
from roundelay.errors import CaptureError, DeadlineError, JobError, UsageError, UserCodeError
from tests.api.jobs import loader, make, mlp
from tests.cli.harness import environment

NOTEBOOK = """
import torch, roundelay
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
data = [(torch.randn(8, 4), torch.randint(0, 2, (8,)))] * 4
job = roundelay.Job(
    model=model,
    loss=lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch[-1]),
    batches=lambda epoch: data,
    optimizer=lambda named: torch.optim.Adam(named, lr=0.05),
)
before = model[0].weight.clone()
captured = roundelay.capture(job)
plan = roundelay.plan(job, workers=2, rule="pipeoptim", captured=captured)
print(roundelay.simulate(plan).makespan_s > 0)
result = roundelay.train(job, plan=plan, steps=12, save_to="here")
print(len(result.updates), result.updates[-1].loss < result.updates[0].loss)
print(not torch.equal(before, model[0].weight), torch.equal(model[0].weight, result.snapshot.parameters["0.weight"]))
plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
print(torch.equal(roundelay.load(plain, "here")[0].weight, model[0].weight))
print(roundelay.verify(job, plan=plan, steps=3).equal)
"""

WITHOUT_TORCH = """
import sys, roundelay
from roundelay import Plan, register_rule, UpdateRule, RoundelayError
import roundelay.ir.plan, roundelay.ir.program, roundelay.ir.rule
import roundelay.schedules, roundelay.simulator, roundelay.schedule_grid
import roundelay.planner.partition_dp, roundelay.planner.prove_plan
import roundelay.lower.verify_schedule, roundelay.actor.machine
assert "torch" not in sys.modules
"""


def fresh(code: str, folder: Path) -> str:
    """What a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_notebook_captures_plans_simulates_trains_loads_and_verifies(tmp_path: Path) -> None:
    assert fresh(NOTEBOOK, tmp_path).split() == ["True", "12", "True", "True", "True", "True", "True"]


def test_plans_programs_and_the_simulator_load_no_torch(tmp_path: Path) -> None:
    fresh(WITHOUT_TORCH, tmp_path)


def test_an_unknown_name_is_told_with_those_that_are_known() -> None:
    with pytest.raises(AttributeError, match="empty_weights, from_local, load, ones, placement, plan"):
        _ = roundelay.pla


def test_evaluate_sees_the_newest_weights_in_eval_mode_after_every_epoch() -> None:
    seen: list[tuple[bool, torch.Tensor]] = []

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        seen.append((model.training, model.get_parameter("0.weight").clone()))
        return {"rows": torch.rand(1).item()}

    model = mlp()
    state = torch.random.get_rng_state()
    result = roundelay.train(make(model, evaluate=evaluate), epochs=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [evaluated.updates for evaluated in result.evaluations] == [5, 10]
    assert [training for training, _ in seen] == [False, False]
    assert torch.equal(seen[-1][1], model.get_parameter("0.weight"))
    assert not torch.equal(seen[0][1], seen[1][1])
    assert model.training


def test_a_wrong_choice_or_job_is_refused_by_name() -> None:
    job = make()
    with pytest.raises(TypeError, match="colour"):
        roundelay.plan(job, colour="red")
    with pytest.raises(CaptureError, match="stages"):
        roundelay.plan(job, workers=99)
    with pytest.raises(JobError, match="Job\\(loss="):
        roundelay.capture(make(loss=3))
    with pytest.raises(UserCodeError, match="division by zero"):
        roundelay.train(make(evaluate=lambda model: {"score": 1 / 0}), steps=1)


def test_train_and_verify_plan_by_themselves() -> None:
    chosen = {"workers": 3, "rule": "pipedream", "cuts": "equal", "micro_batches": 2, "deadline_s": 70.0}
    trained = roundelay.train(make(mlp()), steps=2, **chosen)
    asked = roundelay.plan(make(mlp()), **chosen)
    assert [stage.segments for stage in trained.plan.stages] == [stage.segments for stage in asked.stages]
    for name in ("rule", "micro_batches", "deadline_s"):
        assert getattr(trained.plan, name) == chosen[name]
    verified = roundelay.verify(make(mlp()), steps=2, workers=3, rule="1f1b", micro_batches=4, transport="shm")
    assert verified.equal
    assert len({worker["pid"] for worker in verified.workers.values()}) == 3


@pytest.mark.parametrize("function", [roundelay.train, roundelay.verify])
def test_the_loader_is_waited_for_as_long_as_the_choice_says(function: Callable[..., object]) -> None:
    asked: list[int] = []

    def late(epoch: int) -> object:
        asked.append(epoch)
        time.sleep(1.0)
        return loader(epoch)

    with pytest.raises(DeadlineError, match=r"0\.2 s"):
        function(make(batches=late), steps=1, deadline_s=0.2)
    assert len(asked) < 2, "it was waited for, and asked again"


@pytest.mark.parametrize("function", [roundelay.train, roundelay.verify])
def test_a_plan_beside_a_choice_is_refused_in_words(function: Callable[..., object]) -> None:
    job = make(mlp())
    plan = roundelay.plan(job, workers=2)
    with pytest.raises(UsageError, match=r"plan together with workers, clip in roundelay\.(train|verify)") as refused:
        function(job, plan=plan, workers=2, clip="stage:1", cuts=None)
    assert "roundelay.plan(job, workers=2, clip='stage:1')" in refused.value.remedy
    with pytest.raises(UsageError, match="plan together with rule"):
        function(job, plan=plan, rule="1f1b")


@pytest.mark.parametrize("function", [roundelay.plan, roundelay.train, roundelay.verify, roundelay.compare])
def test_an_unknown_keyword_is_refused_with_those_that_it_is_near_to(
    function: Callable[..., object], tmp_path: Path
) -> None:
    out = {"out": tmp_path / "out"} if function is roundelay.compare else {}
    never = make(batches=lambda epoch: 1 / 0)  # it is refused before anything else is done
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) .* 'worker'; did you mean 'workers'\?"):
        function(never, worker=2, **out)
    with pytest.raises(TypeError, match=r"'x'; it knows .*workers, .*micro_batches, .*memory_limit(, .*backward)?$"):
        function(never, x=2, **out)


def test_a_comparison_is_not_told_a_predictor_beside_its_rules(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'predictor'"):
        roundelay.compare(lambda seed: make(), out=tmp_path, predictor="paper")


def test_what_the_functions_return_prints_on_a_few_lines(tmp_path: Path) -> None:
    job = make(mlp())
    captured = roundelay.capture(job)
    plan = roundelay.plan(job, workers=2, captured=captured, rule="pipeoptim")
    trained = roundelay.train(job, plan=plan, steps=4)
    verified, broken = (roundelay.verify(job, plan=plan, steps=4, tamper=way) for way in (None, "stash"))
    compared = roundelay.compare(lambda seed: make(mlp()), out=tmp_path / "c", rules=["all"], seeds=1, steps=1)
    first, last, rate = trained.updates[0].loss, trained.updates[-1].loss, trained.samples_per_second
    for result, *words in (
        (captured, "Sequential", "10 operations", "9 places to cut", "459 weights"),
        (plan, "'pipeoptim'", "stages=2", *(stage.segments[-1] for stage in plan.stages), "plan.text()"),
        (roundelay.simulate(plan), "workers=2", "makespan_s=", "bubble="),
        (trained, "'pipeoptim'", "workers=2", "updates=4", f"{first:.4f} -> {last:.4f}", f"second={rate:.1f}"),
        (verified, "equal=True", f"tensors={verified.tensors}", "steps=4"),
        (broken, "equal=False", broken.difference),
        (compared, "gpipe", f"{len(compared.variants)} in all", "seeds=1", f"runs={len(compared.results)}"),
    ):
        for text in (repr(result), str(result), f"{result}"):
            assert all(word in text for word in words), text
            assert text.count("\n") < 3
            assert len(text) <= 240, "three lines of a terminal"
    deep = roundelay.plan(job, workers=8, captured=captured)
    assert len(repr(deep)) <= 240


def test_a_failed_run_leaves_the_model_usable_and_a_second_one_works() -> None:
    job = make(mlp())

    def broken(epoch: int) -> list[object]:
        return [*itertools.islice(job.batches(epoch), 3), 7]

    with pytest.raises(JobError, match="micro-batch"):
        roundelay.train(make(job.model, batches=broken), epochs=1)
    assert roundelay.verify(job, steps=4).equal
