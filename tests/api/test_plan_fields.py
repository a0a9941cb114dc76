"""Every field of a plan acts: another value changes what is simulated or run, or is refused.

A field without an entry in ``ACTS`` fails, so that none can be added that nobody obeys.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roundelay
from roundelay.actor.machine import Run
from roundelay.cli.sim_output import show_simulation, simulation_json
from roundelay.errors import DeadlineError, InternalError, PlanError
from roundelay.frontend import Captured
from roundelay.ir.averages import EMA
from roundelay.ir.exchange import ExchangePlan, Phase
from roundelay.ir.given_signatures import GivenSignatures
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from roundelay.ir.sbp import parse
from roundelay.job import Job
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.runtime.handlers import Context, do_forward
from roundelay.session.training import Length, Session, Trained
from tests.api.jobs import make, mlp


@functools.cache
def given() -> tuple[Job, Captured, Plan]:
    """A job, captured, and a plan of three stages with times that depend on no measurement."""
    job = make(mlp())
    captured = roundelay.capture(job)
    choices: dict[str, Any] = {"rule": "pipeoptim", "micro_batches": 2, "backward": "stash"}
    made = roundelay.plan(job, workers=3, captured=captured, cuts="roofline", **choices)
    stages = tuple(
        dataclasses.replace(stage, forward_s=0.002, backward_s=0.004, update_s=0.001) for stage in made.stages
    )
    edges = tuple(dataclasses.replace(edge, forward_bytes=500, backward_bytes=400) for edge in made.edges)
    rates = {"latency_s": 1e-4, "bytes_per_s": 1e6, "read_s": 0.0}
    return job, captured, dataclasses.replace(made, stages=stages, edges=edges, **rates)  # type: ignore[arg-type]


def edited(changes: dict[str, Any]) -> Plan:
    """The plan with fields changed, written and read; ``stages.`` and so on name fields of the first part."""
    plan = given()[2]
    for path, value in changes.items():
        group, _, name = path.rpartition(".")
        if group:
            first, *rest = getattr(plan, group)
            name, value = group, (dataclasses.replace(first, **{name: value}), *rest)
        plan = dataclasses.replace(plan, **{name: value})
    return Plan.parse(plan.text())


def session(plan: Plan, steps: int = 4) -> Session:
    """A session of the job on a plan, from the first weights on."""
    job, captured, _ = given()
    with torch.no_grad():
        for name, value in mlp().state_dict().items():
            job.model.state_dict()[name].copy_(value)
    return Session(job, captured, plan, 0, Length(steps=steps))


def run(plan: Plan, **options: Any) -> Trained:
    """Train."""
    return session(plan).run(notify=lambda event: None, **options)


@functools.cache
def plain() -> Trained:
    """The run of the plan as it is."""
    return run(edited({}))


def trains_otherwise(changes: dict[str, Any]) -> bool:
    """Whether the run computes other weights, which it does in the same way every time."""
    one, two = (run(edited(changes)).snapshot.parameters for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    return any(not torch.equal(one[name], value) for name, value in plain().snapshot.parameters.items())


def slower(changes: dict[str, Any]) -> bool:
    """Whether the simulated run takes longer."""
    return roundelay.simulate(edited(changes)).makespan_s > roundelay.simulate(edited({})).makespan_s


def refused(changes: dict[str, Any], act: Callable[[Plan], object] = session) -> bool:
    """Whether the plan is refused."""
    with pytest.raises(PlanError):
        act(edited(changes))
    return True


def shows_weights(capsys: pytest.CaptureFixture[str]) -> bool:
    """The bytes of the weights are simulated with, and told."""
    plan = edited({"stages.parameter_bytes": 5 * 2**20})
    simulation = roundelay.simulate(plan)
    assert simulation_json(plan, simulation)["per_worker"][0]["parameter_bytes"] == 5 * 2**20
    show_simulation(plan, simulation, 8)
    return "5.0 MiB" in capsys.readouterr().out


def keeps_deadline(capsys: pytest.CaptureFixture[str]) -> bool:
    """A silence longer than the deadline is an error, a shorter one is none."""

    def sleep(context: Context, run: Run) -> MicroBatch | None:
        time.sleep(1.0 if run.g == 1 else 0.0)
        return do_forward(context, run)

    run(edited({"deadline_s": 60.0}), handlers={1: {"forward": sleep}})
    with pytest.raises(DeadlineError, match="deadline_s"):
        run(edited({"deadline_s": 0.2}), handlers={1: {"forward": sleep}})
    return refused({"deadline_s": 0.0})


def peaks(changes: dict[str, Any]) -> tuple[int, dict[int, int], int]:
    """Bytes of the first stage's tapes, and messages and their bytes on the way to the second one."""
    workers = roundelay.simulate(edited(changes)).workers
    return workers[0].tape_bytes_peak, workers[1].unread_peak, workers[1].unread_bytes_peak


def runs_ahead() -> bool:
    """Where the order is free, so many forwards of stage 0 wait for their backward."""
    plan = edited({"rule": "ravnest", "predictor": "none", "edges.slots": 9, "stages.tape_bytes": 5})
    plans = [
        dataclasses.replace(plan, stages=tuple(dataclasses.replace(s, in_flight=most) for s in plan.stages))
        for most in (2, 4)
    ]
    return [roundelay.simulate(one, batches=9).workers[0].tape_bytes_peak for one in plans] == [10, 20]


def owes() -> bool:
    """Under a rule of two halves, stage 0 holds at most all tapes, or all but one and what one backward owes."""
    halved = {"rule": "zb-h1", "predictor": "none", "micro_batches": 6, "stages.tape_bytes": 5}
    return [peaks({**halved, "stages.owed_bytes": owed})[0] for owed in (1, 7)] == [15, 17]


def cuts_elsewhere(capsys: pytest.CaptureFixture[str]) -> bool:
    """Another end gives the first stage other operations; an unknown one, and one behind the next, are refused."""
    graph, ends = given()[1].graph, [stage.segments[-1] for stage in given()[2].stages]
    other = next(graph.ops[cut].name for cut in graph.cuts if graph.ops[cut].name != ends[0])
    refused({"stages.segments": ("nowhere",)})
    refused({"stages.segments": (ends[-1],)})
    moved = session(edited({"stages.segments": (other,)})).partition.stages[0].segments[-1]
    return graph.ops[moved.stop - 1].name == other


def leaves_the_process(capsys: pytest.CaptureFixture[str]) -> bool:
    """Over gloo every worker is a process; the weights are the same."""
    there, here = run(edited({"transport": "gloo"})), plain()
    assert {worker["pid"] for worker in here.workers.values()} == {os.getpid()}
    assert all(torch.equal(there.snapshot.parameters[n], w) for n, w in here.snapshot.parameters.items())
    return len({worker["pid"] for worker in there.workers.values()} - {os.getpid()}) == 3


def limits_messages(capsys: pytest.CaptureFixture[str]) -> bool:
    """More slots let a fast sender run further ahead."""
    fast = {"stages.forward_s": 1e-6, "stages.backward_s": 1e-6}
    into = next(c.id for c in emit(read(edited({})))[1].channels if c.kind == "forward" and c.sources[0].stage == 0)
    ahead = [peaks(fast | {"edges.slots": slots})[1][into] for slots in (1, 2)]
    assert ahead == [1, 2]
    return refused({"edges.slots": 0})


def scales() -> bool:
    """A scale at which every gradient overflows trains nothing; beside another precision it is refused."""
    ends = [run(edited({"precision": "fp16", "loss_scale": scale})).snapshot.parameters for scale in ("1", str(2**40))]
    first = mlp().state_dict()
    assert all(torch.equal(ends[1][name], first[name]) for name in ends[1])
    assert not any(torch.equal(ends[0][name], first[name]) for name in ends[0])
    return refused({"loss_scale": "1024"}) and refused({"precision": "fp16"})


def recomputes() -> bool:
    """Tapes are smaller than without; a mode that does so already, and a module that is not there, are refused."""
    less, held = (made.workers[0]["tape_bytes"]["0"] for made in (run(edited({"recompute": ("all",)})), plain()))
    refused({"recompute": ("all",), "backward": "recompute"})
    return refused({"recompute": ("nowhere",)}) and 0 < less < held


def compiles(capsys: pytest.CaptureFixture[str]) -> bool:
    """Without a compiler it is refused; tests/api/test_compile_stages.py shows that the compiled stages are what
    runs."""
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        run(edited({"compile": False}))
        return refused({"compile": True}, run)


def deals_out(capsys: pytest.CaptureFixture[str]) -> bool:
    """Two replicas are refused without workers and exchanges; with them each computes half of the micro-batches."""
    assert refused({"replicas": 2})
    assert refused({"replicas": 0})
    plan = replicas()
    twice, once = run(plan), run(edited({"rule": "1f1b", "predictor": "none", "micro_batches": 4}))
    assert [u.loss for u in twice.updates] == pytest.approx([u.loss for u in once.updates], rel=1e-3)
    forwards = [[e.g for e in twice.events[worker] if e.opcode == "forward"] for worker in (0, 1)]
    return forwards[0] == forwards[1] == list(range(2 * len(twice.updates)))


@functools.cache
def replicas() -> Plan:
    """A plan of two replicas of one stage each."""
    job, captured, _ = given()
    made = roundelay.plan(job, captured=captured, data_parallel=2, workers=1, rule="1f1b", micro_batches=2)
    rates: dict[str, Any] = {"latency_s": 1e-4, "bytes_per_s": 1e6, "read_s": 0.0, "input_bytes": 100}
    return dataclasses.replace(made, **rates)


def planned_elements() -> int:
    """Elements of the gradients that two replicas exchange."""
    return replicas().exchanges[0].shapes[0][0]


def exchanges_slower(**fields: Any) -> bool:
    """Whether the simulated run of two replicas takes longer with another exchange."""
    plan = replicas()
    other = dataclasses.replace(plan, exchanges=(dataclasses.replace(plan.exchanges[0], **fields),))
    return roundelay.simulate(other).makespan_s > roundelay.simulate(plan).makespan_s


def exchanges_refused(**fields: Any) -> bool:
    """Whether the plan of two replicas is refused with another exchange."""
    plan = replicas()
    other = dataclasses.replace(plan, exchanges=(dataclasses.replace(plan.exchanges[0], **fields),))
    return refused({}, lambda _: session(Plan.parse(other.text())))


@functools.cache
def on_mesh() -> Plan:
    """A plan of one stage on a mesh of two workers."""
    job, captured, _ = given()
    return roundelay.plan(job, captured=captured, tensor_parallel=2, workers=1, rule="1f1b", micro_batches=2)


def boxes_refused(**fields: Any) -> bool:
    """Whether the plan on a mesh is refused with another boxing."""
    plan = on_mesh()
    other = (dataclasses.replace(plan.exchanges[0], **fields), *plan.exchanges[1:])
    text = dataclasses.replace(plan, exchanges=other).text()
    return refused({}, lambda _: session(Plan.parse(text)))


def divides() -> bool:
    """Each worker of the mesh has its part of the split weights; a mesh that the workers do not fill is refused."""
    plan = on_mesh()
    whole = sum(weight.numel() * 4 for weight in plain().snapshot.parameters.values())
    larger = dataclasses.replace(plan, mesh={"tensor": 3})
    return plan.stages[0].parameter_bytes < whole and refused({}, lambda _: session(Plan.parse(larger.text())))


def splits() -> bool:
    """What a plan says of a parameter is what its workers have; a pattern that matches nothing is refused."""
    plan = on_mesh()
    odd = dataclasses.replace(plan, parameters={"nothing.*": (("tensor", parse("S(0)")),)})
    return bool(plan.parameters) and refused({}, lambda _: session(Plan.parse(odd.text())))


def splits_outputs() -> bool:
    """A result that is split by rows is boxed where it is read whole; a name that matches nothing is refused."""
    job, captured, _ = given()
    pairs = {captured.graph.ops[0].name: (("tensor", parse("S(0)")),)}
    own = GivenSignatures({"tensor": 2}, {}, pairs)
    plan = roundelay.plan(job, captured=captured, signatures=own, workers=1, rule="1f1b", micro_batches=2)
    odd = dataclasses.replace(plan, outputs={"nothing.*": (("tensor", parse("S(0)")),)})
    assert any(exchange.value for exchange in plan.exchanges)
    texts = [odd.text(), dataclasses.replace(plan, outputs={}).text()]
    return all(refused({}, lambda _, text=text: session(Plan.parse(text))) for text in texts)


def divides_states() -> bool:
    """Each replica has a part of what a plan names; a pattern that matches nothing is refused."""
    job, captured, _ = given()
    plan = roundelay.plan(job, captured=captured, data_parallel=2, zero=1, workers=1, rule="1f1b", micro_batches=2)
    longest = dict(list(plan.states.items())[1:])  # one less is divided than is exchanged
    others: tuple[dict[str, Any], ...] = ({"nothing.*": (("replicas", parse("S(0)")),)}, longest)
    runs = run(plan)
    assert all(torch.equal(runs.snapshot.parameters[n], w) for n, w in run(replicas()).snapshot.parameters.items())
    texts = [dataclasses.replace(plan, states=other).text() for other in others]
    return all(refused({}, lambda _, text=text: session(Plan.parse(text))) for text in texts)


def divides_gradients() -> bool:
    """Each micro-batch's gradients are exchanged when they are made; a plan that says so and does not is refused."""
    job, captured, _ = given()
    chosen: dict[str, Any] = {"data_parallel": 2, "workers": 1, "rule": "1f1b", "micro_batches": 2}
    one, other = (roundelay.plan(job, captured=captured, zero=zero, **chosen) for zero in (1, 2))
    sent = [sum(sum(worker["bytes_sent"].values()) for worker in run(plan).workers.values()) for plan in (one, other)]
    wrong = dataclasses.replace(one, sharded=other.sharded).text()
    return sent[1] > sent[0] and refused({}, lambda _: session(Plan.parse(wrong)))


def divides_in_groups() -> bool:
    """Groups of replicas add up their parts of gradients; a plan that says so and does not is refused."""
    job, captured, _ = given()
    chosen: dict[str, Any] = {"captured": captured, "workers": 1, "rule": "1f1b", "micro_batches": 1}
    plan = roundelay.plan(job, hybrid="2x2", **chosen)
    own, all_in_one = (run(one) for one in (plan, roundelay.plan(job, data_parallel=4, zero=3, **chosen)))
    for g, (loss, _) in all_in_one.micro_losses.items():
        assert own.micro_losses[g][0] == pytest.approx(loss, rel=1e-4)
    texts = [dataclasses.replace(plan, shards=other).text() for other in (0, 3)]
    return all(refused({}, lambda _, text=text: session(Plan.parse(text))) for text in texts)


def leaves_out() -> bool:
    """A gradient that is not to be exchanged, and is there, ends the run before its first update."""
    plan = replicas()
    name, weight = next(iter(plain().snapshot.parameters.items()))
    fewer = planned_elements() - weight.numel()
    odd = dataclasses.replace(plan.exchanges[0], unused=(name,), shapes=((fewer,), (1,)))
    with pytest.raises(InternalError, match="as `unused`"):
        run(dataclasses.replace(plan, exchanges=(odd,)))
    return True


def sends_inputs() -> bool:
    """The bytes of a micro-batch's data are what another replica waits for."""
    plan = replicas()
    more = dataclasses.replace(plan, input_bytes=10**6)
    return roundelay.simulate(more).makespan_s > roundelay.simulate(plan).makespan_s + 1.0


def averages() -> bool:
    """Another decay, other averages; without one there are none."""
    found = [run(edited({"ema": decay})).snapshot.optimizer for decay in (0.0, 0.5, 0.9)]
    assert not any(EMA in state for state in found[0].values())
    return any(not torch.equal(found[1][name][EMA], state[EMA]) for name, state in found[2].items())


def asks_torch() -> bool:
    """The loss is called while torch is asked for deterministic forms."""
    seen: list[bool] = []

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    watched = dataclasses.replace(given()[0], loss=loss)
    for wanted in (False, True):
        seen.clear()
        roundelay.train(watched, plan=edited({"deterministic": wanted}), steps=1, check="off")
        assert seen[-1] == wanted
    return True


def computes_on_two_threads() -> bool:
    """Each worker computes with as many intra-op threads as the plan says, although they share a process."""
    trained = run(edited({"workers.threads": 2}))
    return [report["threads"] for _, report in sorted(trained.workers.items())] == [2, 1, 1]


ACTS: dict[str, Callable[[pytest.CaptureFixture[str]], bool]] = {
    "format": lambda _: refused({"format": 14}),
    "model": lambda _: refused({"model": "0" * 24}),
    "layout": lambda _: refused({"layout": "none"}) and refused({"layout": "dp"}),
    "rule": lambda _: trains_otherwise({"rule": "1f1b", "predictor": "none"}) and refused({"rule": "none"}),
    "predictor": lambda _: trains_otherwise({"predictor": "paper"}) and refused({"predictor": "none"}),
    "backward": lambda _: trains_otherwise({"backward": "recompute"}) and slower({"backward": "recompute"}),
    "recompute": lambda _: recomputes(),
    "compile": compiles,
    "precision": lambda _: trains_otherwise({"precision": "bf16"}) and refused({"precision": "fp8"}),
    "loss_scale": lambda _: scales(),
    "clip": lambda capsys: trains_otherwise({"clip": "stage:0.001"}),
    "ema": lambda _: averages(),
    "deterministic": lambda _: asks_torch(),
    "replicas": deals_out,
    "mesh": lambda _: divides(),
    "parameters": lambda _: splits(),
    "outputs": lambda _: splits_outputs(),
    "states": lambda _: divides_states(),
    "sharded": lambda _: divides_gradients(),
    "shards": lambda _: divides_in_groups(),
    "micro_batches": lambda _: trains_otherwise({"micro_batches": 3}) and slower({"micro_batches": 3}),
    "transport": leaves_the_process,
    "deadline_s": keeps_deadline,
    "latency_s": lambda _: slower({"latency_s": 0.01}),
    "bytes_per_s": lambda _: slower({"bytes_per_s": 1e4}) and refused({"bytes_per_s": 0.0}),
    "instruction_s": lambda _: slower({"instruction_s": 0.001}),
    "read_s": lambda _: slower({"read_s": 0.05}),
    "input_bytes": lambda _: sends_inputs(),
    "stages.segments": cuts_elsewhere,
    "workers.name": lambda _: refused({"workers.name": "nobody"}),
    "workers.device": lambda _: refused({"workers.device": "cuda:9999"}) and refused({"workers.device": "tpu"}),
    "workers.threads": lambda _: computes_on_two_threads() and refused({"workers.threads": 0}),
    "workers.speed": lambda _: slower({"workers.speed": 0.2}) and refused({"workers.speed": 0.0}),
    "stages.workers": lambda _: refused({"stages.workers": ("w9",)}) and refused({"stages.workers": ("w1",)}),
    "stages.forward_s": lambda _: slower({"stages.forward_s": 0.01}),
    "stages.backward_s": lambda _: slower({"stages.backward_s": 0.02}),
    "stages.weights_s": lambda _: slower({"stages.weights_s": 0.02}),
    "stages.owed_bytes": lambda _: owes(),
    "stages.in_flight": lambda _: runs_ahead() and refused({"stages.in_flight": 2}),
    "stages.update_s": lambda _: slower({"stages.update_s": 0.02}),
    "stages.parameter_bytes": shows_weights,
    "stages.tape_bytes": lambda _: peaks({"stages.tape_bytes": 7})[0] == 3 * 7,  # D - k forwards in flight
    "edges.source": lambda _: refused({"edges.source": 1}) and refused({"edges.source": 2}, roundelay.simulate),
    "edges.target": lambda _: refused({"edges.target": 2}) and refused({"edges.target": 3}, roundelay.simulate),
    "edges.slots": limits_messages,
    "edges.forward_bytes": lambda _: (
        slower({"edges.forward_bytes": 9000}) and peaks({"edges.forward_bytes": 9000})[2] > 9000
    ),
    "edges.backward_bytes": lambda _: slower({"edges.backward_bytes": 9000}),
    "edges.gradient": lambda _: refused({"edges.gradient": False}),
    "edges.latency_s": lambda _: slower({"edges.latency_s": 0.01, "edges.bytes_per_s": 1e6}),
    "edges.bytes_per_s": lambda _: slower({"edges.bytes_per_s": 1e4}),
    "exchanges.stage": lambda _: exchanges_refused(stage=1),
    "exchanges.kind": lambda _: exchanges_refused(kind="ring"),
    "exchanges.axis": lambda _: exchanges_refused(axis="rows"),
    "exchanges.value": lambda _: boxes_refused(value="nothing"),
    "exchanges.segment": lambda _: boxes_refused(segment=2),
    "exchanges.phases": lambda _: exchanges_refused(phases=(Phase.parse("all-gather(0)"),)),
    "exchanges.dtypes": lambda _: exchanges_slower(dtypes=("float64", "float64")) and exchanges_refused(dtypes=()),
    "exchanges.shapes": lambda _: (
        exchanges_slower(shapes=((9000,), (1,))) and exchanges_refused(shapes=((9000,), (1,)))
    ),
    "exchanges.unused": lambda _: leaves_out(),
    "exchanges.seconds": lambda _: exchanges_slower(seconds=9.0),
    "exchanges.busy_s": lambda _: exchanges_slower(busy_s=9.0),
}


def test_no_field_of_a_plan_is_left_out() -> None:
    names = {f.name for f in dataclasses.fields(Plan)} - {"workers", "stages", "edges", "exchanges"}
    names |= {f"workers.{f.name}" for f in dataclasses.fields(WorkerPlan)}
    names |= {f"stages.{f.name}" for f in dataclasses.fields(StagePlan)}
    names |= {f"edges.{f.name}" for f in dataclasses.fields(EdgePlan)}
    names |= {f"exchanges.{f.name}" for f in dataclasses.fields(ExchangePlan)}
    assert names == set(ACTS)


@pytest.mark.parametrize("field", ACTS)
def test_a_field_acts(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ACTS[field](capsys)


def test_the_number_of_stages_acts() -> None:
    plan = edited({})
    assert refused({}, lambda p: session(dataclasses.replace(p, stages=plan.stages[:2], edges=plan.edges[:1])))
    with pytest.raises(PlanError):
        Plan.parse(dataclasses.replace(plan, stages=(), edges=()).text())


def test_the_simulated_events_are_those_of_the_run() -> None:
    for changes in ({}, {"predictor": "released-code"}, {"rule": "gpipe", "predictor": "none"}):
        plan = edited(changes)
        simulation, trained = roundelay.simulate(plan, batches=4), run(plan)
        for worker, events in trained.events.items():
            assert [event[-1] for event in events] == list(simulation.events[worker])
