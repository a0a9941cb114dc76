"""Optimizer states, and gradients, split over replicas: the same updates, and each replica holds its part of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, RMSprop

from roundelay.api.train_job import train
from roundelay.checkpoint.checkpoint import load
from roundelay.errors import JobError, PlanError, UsageError
from roundelay.ir.clip import Clip
from roundelay.ir.exchange import GRADIENT_PARTS, USED, WEIGHT_FORWARD
from roundelay.ir.given_signatures import GivenSignatures
from roundelay.ir.plan import Plan
from roundelay.ir.program import GRADIENTS
from roundelay.ir.sbp import Split, parse
from roundelay.lower.channels import channels_of, exchanges_of
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.lower.verify_schedule import check_run
from roundelay.planner import weight_segments
from roundelay.planner.inherited_choices import inherited
from roundelay.planner.memory_model import estimate_memory
from roundelay.planner.mesh_signatures import residences_of
from roundelay.planner.plan_options import Choices
from roundelay.planning.planning import plan as planned
from roundelay.proof import fidelity_on_mesh
from roundelay.proof.fidelity_on_mesh import differs_on_mesh
from roundelay.proof.run_vs_reference import verify
from roundelay.proof.tamper_ways import EXCHANGE_WAYS, STALE_GATHER, WAYS
from roundelay.runtime.gradients import Gradients
from roundelay.runtime.owned_weights import OwnedWeights
from roundelay.runtime.stage_state import Stage
from roundelay.runtime.state_bucket import StateBucket
from roundelay.session.checkpointing import Saving
from roundelay.session.events import Drained, Event
from roundelay.session.stop_condition import Length
from tests.api.jobs import make
from tests.equivalence.cells import DEADLINE_S, Bench, bench
from tests.equivalence.test_mesh import trained
from tests.lower.test_verify_schedule import fired_in
from tests.resume.cuts import Trip, differences, every_checkpoint
from tests.zoo import ZOO

LEVELS = (1, 2, 3)


def split(place: Bench, rule: str, stages: int, replicas: int | str, **fields: Any) -> Plan:
    """A plan with ``--zero 1``, or with ``--hybrid`` if replicas are given as RxS, as planned and read from a file."""
    holders = {"hybrid": replicas} if isinstance(replicas, str) else {"data_parallel": replicas, "zero": 1}
    options = {"micro_batches": 2, "cuts": "roofline", "deadline_s": DEADLINE_S} | holders | fields
    made = planned(place.job(), captured=place.captured, workers=stages, rule=rule, **options)
    return Plan.parse(made.text())


def held(place: Bench, plan: Plan, **options: Any) -> None:
    found = place.verify(plan, **options)
    assert found.equal, found.difference


RULES = [
    ("1f1b", "gpt2", 2, 2, "mixed"),
    ("1f1b", "skip", 2, 3, "recompute"),
    ("gpipe", "bert_classifier", 1, 3, "stash"),
    ("zb-h1", "gpt2", 2, 2, "stash"),  # weight halves come after the next backward
    ("zb-h1", "dropout_heavy", 2, 2, "mixed"),
    ("zb-v", "mlp", 2, 2, "stash"),
    ("pipedream", "skip", 2, 3, "stash"),
    ("pipedream-2bw", "mlp", 2, 2, "stash"),
    ("pipedream-vertical", "gpt2", 2, 2, "stash"),
    ("cdp-v1", "gpt2", 2, 2, "stash"),
    ("cdp-v2", "llama", 2, 2, "stash"),
    ("async", "gpt2", 2, 2, "mixed"),
    ("async", "mlp", 2, 2, "recompute"),
    ("spectrain", "gpt2", 2, 2, "mixed"),
    ("lookahead", "skip", 1, 2, "stash"),
    ("pipeoptim", "gpt2", 2, 2, "stash"),
    ("pipeoptim", "skip", 3, 2, "mixed"),
]


@pytest.mark.parametrize(("rule", "model", "stages", "replicas", "backward"), RULES)
@pytest.mark.parametrize("zero", LEVELS)
def test_every_rule_computes_what_its_reference_does(
    monkeypatch: pytest.MonkeyPatch, rule: str, model: str, stages: int, replicas: int, backward: str, zero: int
) -> None:
    monkeypatch.setattr(weight_segments, "LEAST", 1)
    place = bench(model)
    if backward == "recompute" and zero == 3:
        pytest.skip("refused")
    plan = split(place, rule, stages, replicas, zero=zero, backward=backward)
    gathers = {(e.stage, e.segment) for e in plan.exchanges if e.kind == WEIGHT_FORWARD}
    assert bool(gathers) == (zero == 3 or plan.predictor != "none")
    assert not gathers or len(gathers) > stages
    held(place, plan, steps=5)


@pytest.mark.parametrize(
    ("rule", "model", "stages", "hybrid", "fields"),
    [
        ("1f1b", "gpt2", 1, "2x2", {}),
        ("1f1b", "mlp", 2, "2x3", {"clip": "global:0.1", "backward": "mixed"}),
        ("zb-h1", "gpt2", 2, "2x2", {"ema": 0.9}),
        ("pipedream", "gpt2", 2, "2x2", {"precision": "bf16"}),
        ("pipeoptim", "skip", 2, "3x2", {"clip": "previous:0.1"}),
        ("1f1b", "gpt2", 1, "2x2", {"tensor_parallel": 2}),
        ("gpipe", "gpt2", 1, "2x2", {"precision": "fp16", "loss_scale": "dynamic:65536:2"}),
        ("1f1b", "gpt2", 1, "2x2", {"transport": "shm"}),
        ("1f1b", "gpt2", 1, "2x2", {"transport": "gloo"}),
    ],
)
def test_groups_of_replicas_that_split_weights_compute_what_the_reference_does(
    rule: str, model: str, stages: int, hybrid: str, fields: dict[str, Any]
) -> None:
    place = bench(model)
    held(place, split(place, rule, stages, hybrid, **fields), steps=4)


@pytest.mark.parametrize("predictor", ["paper", "released-code"])
@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.1, momentum=0.9), partial(RMSprop, lr=1e-3)])
def test_replicas_predict_their_parts_by_each_setting(predictor: str, optimizer: Callable[..., Any]) -> None:
    place = bench("mlp")
    plan = split(place, "pipeoptim", 3, 2, zero=3, predictor=predictor)
    found = place.verify(plan, place.job(optimizer), steps=6)
    assert found.equal, found.difference


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("zero", LEVELS)
def test_it_does_between_processes_and_beside_a_mesh(transport: str, zero: int) -> None:
    place = bench("gpt2")
    held(place, split(place, "1f1b", 1, 2, tensor_parallel=2, transport=transport, zero=zero))


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("zero", [0, *LEVELS])
def test_parts_of_the_mesh_that_are_uneven_are_exchanged_between_processes(transport: str, zero: int) -> None:
    job = make(uneven(), optimizer=lambda named: AdamW(named, lr=0.01))
    chosen = {"workers": 1, "data_parallel": 2, "tensor_parallel": 2, "zero": zero, "transport": transport}
    found = verify(job, rule="1f1b", micro_batches=2, steps=2, **chosen)
    assert found.equal, found.differences()


@pytest.mark.parametrize("zero", LEVELS)
def test_what_losses_count_is_exchanged_though_all_gradients_are_in_parts(zero: int) -> None:
    def loss(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kept = batch[1] > 0
        return nn.functional.cross_entropy(outputs[kept], batch[1][kept], reduction="sum"), kept.sum()

    job = make(uneven(), loss=loss, optimizer=lambda named: SGD(named, lr=0.1))
    found = verify(job, workers=1, data_parallel=2, zero=zero, rule="1f1b", micro_batches=2, steps=3)
    assert found.equal, found.differences()


@pytest.mark.parametrize("axis", ["weights", "due", "segment", "gradients"])
def test_an_axis_may_have_any_name(axis: str) -> None:
    job = make(uneven(), optimizer=lambda named: SGD(named, lr=0.1))
    columns, rows = ((axis, parse("S(0)")),), ((axis, parse("S(1)")),)
    given = GivenSignatures({axis: 2}, {"0.weight": columns, "0.bias": columns, "2.weight": rows})
    found = verify(job, signatures=given, workers=1, data_parallel=2, zero=3, rule="1f1b", micro_batches=2, steps=2)
    assert found.equal, found.differences()


def uneven() -> nn.Module:
    """13 columns, of which the second worker has 6."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 12), nn.GELU(), nn.Linear(12, 3))


@pytest.mark.parametrize(
    "fields",
    [
        {"clip": "global:0.1"},
        {"clip": "previous:0.1"},
        {"ema": 0.9},
        {"precision": "fp16", "loss_scale": "dynamic:65536:2"},
        {"precision": "bf16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("zero", LEVELS)
def test_whatever_else_the_plan_says(fields: dict[str, Any], zero: int) -> None:
    place = bench("gpt2")
    held(place, split(place, "1f1b", 2, 2, tensor_parallel=2, zero=zero, **fields))


@pytest.mark.parametrize("fields", [{}, {"tensor_parallel": 3, "zero": 0}, {"tensor_parallel": 3}])
def test_a_part_is_updated_as_a_tensor_of_its_own(fields: dict[str, Any]) -> None:
    """Fused kernels round the last elements of a tensor otherwise than those amid it."""
    place = bench("gpt2")
    job = place.job(lambda named: SGD(named, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True))
    found = place.verify(split(place, "1f1b", 1, 3, **fields), job)
    assert found.equal, found.difference


@pytest.mark.parametrize("zero", LEVELS)
def test_the_whole_proof_from_plain_pytorch_on(zero: int) -> None:
    place = bench("mlp")
    found = verify(place.job(), plan=split(place, "1f1b", 1, 2, zero=zero), steps=3)
    assert found.fidelity is not None
    assert found.fidelity.equal, found.differences()
    assert found.fidelity.mesh == f"2 replicas x ZeRO {zero}"
    assert found.equal, found.differences()


@pytest.mark.parametrize(
    ("replicas", "zero", "broken"),
    [(2, 0, "total_gradients"), (2, 2, "add_made"), ("2x2", 3, "add_made"), ("2x2", 3, "total_gradients")],
)
def test_replicas_that_a_reference_leaves_out_differ_from_one_worker(
    monkeypatch: pytest.MonkeyPatch, replicas: int | str, zero: int, broken: str
) -> None:
    place = bench("mlp")
    fields = {} if isinstance(replicas, str) else {"zero": zero}
    plan = split(place, "1f1b", 1, replicas, **fields)
    (batch, *_) = place.job().batches(0)  # type: ignore[operator]
    assert differs_on_mesh(place.captured, plan, batch, 0) == ""
    sums = getattr(fidelity_on_mesh, broken)
    monkeypatch.setattr(fidelity_on_mesh, broken, lambda each, *more: sums(each[:1], *more))
    found = differs_on_mesh(place.captured, plan, batch, 0)
    assert "gradient of" in found


def test_it_trains_after_a_full_check() -> None:
    chosen = {"workers": 2, "rule": "1f1b", "data_parallel": 2, "zero": 1, "cuts": "equal"}
    done = train(bench("mlp").job(), steps=2, check="full", **chosen)
    assert len(done.updates) == 2


def test_a_stage_that_goes_on_before_it_has_gathered_its_weights_is_refused() -> None:
    plan = split(bench("mlp"), "1f1b", 1, 2)
    fired = fired_in(plan, [2, 2])
    check_run(read(plan), [2, 2], fired)
    opcodes = [f.opcode for f in fired[1]]
    at = opcodes.index("update")
    assert opcodes[at + 1 : at + 3] == ["box", "unbox"]
    late = [*fired[1][: at + 1], *fired[1][at + 3 : at + 4], *fired[1][at + 1 : at + 3], *fired[1][at + 4 :]]
    with pytest.raises(PlanError, match="no box of updated weights before it"):
        check_run(read(plan), [2, 2], [fired[0], late])


def test_a_micro_batch_whose_gradients_are_not_exchanged_before_the_next_is_refused() -> None:
    plan = split(bench("mlp"), "1f1b", 1, 2, zero=2)
    fired = fired_in(plan, [2, 2])
    check_run(read(plan), [2, 2], fired)
    at = next(i for i, f in enumerate(fired[1]) if f.of.startswith(GRADIENTS))
    assert fired[1][at - 1].opcode == "backward"
    late = [*fired[1][:at], *fired[1][at + 2 : at + 5], *fired[1][at : at + 2], *fired[1][at + 5 :]]
    with pytest.raises(PlanError, match="gradients 0 of micro-batch 0 not exchanged before it"):
        check_run(read(plan), [2, 2], [fired[0], late])


def test_a_forward_whose_weights_are_not_gathered_before_it_is_refused() -> None:
    plan = split(bench("mlp"), "1f1b", 1, 2, zero=3)
    fired = fired_in(plan, [2, 2])
    check_run(read(plan), [2, 2], fired)
    at = next(i for i, f in enumerate(fired[1]) if f.opcode == "forward")
    late = [*fired[1][: at - 1], fired[1][at], fired[1][at - 1], *fired[1][at + 1 :]]
    with pytest.raises(PlanError, match="the weights of segment 0 not gathered before it"):
        check_run(read(plan), [2, 2], [fired[0], late])


def test_a_gather_of_another_version_than_the_forward_reads_is_refused() -> None:
    plan = split(bench("mlp"), "pipedream-2bw", 2, 2, zero=3)
    fired = fired_in(plan, [2, 2])
    check_run(read(plan), [2, 2], fired)
    at = next(i for i, f in enumerate(fired[0]) if f.opcode == "box" and f.g == 3)
    other = [*fired[0][:at], replace(fired[0][at], reads=fired[0][at].reads + 1), *fired[0][at + 1 :]]
    with pytest.raises(PlanError, match="forward of micro-batch 3: got the weights of segment 0 not gathered before"):
        check_run(read(plan), [2, 2], [other, *fired[1:]])


def test_weights_travel_while_the_part_before_runs_and_gradients_while_the_next_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_segments, "LEAST", 1)
    (program, _) = emit(read(split(bench("gpt2"), "1f1b", 1, 2, zero=3)))
    lines = [f"{line.opcode} {line.of or line.segments}" for line in program.body]
    turn = next(i for i, line in enumerate(program.body) if line.opcode == "backward")
    ran, ran_back = lines[: turn - 4], lines[turn - 4 :]
    for i in range(2, 6):
        assert in_order(ran, f"box segment {i}", f"forward {i - 1}:{i}", f"unbox segment {i}", f"forward {i}:{i + 1}")
        assert in_order(ran_back, f"box segment {i}", f"backward {i + 1}:{i + 2}", f"unbox segment {i}")
        assert in_order(ran_back, f"box gradients {i}", f"backward {i - 1}:{i}", f"unbox gradients {i}")


def in_order(lines: list[str], *expected: str) -> bool:
    places = [lines.index(line) for line in expected]
    return places == sorted(places)


def test_few_weights_are_whole_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_segments, "LEAST", 1)
    place = bench("gpt2")
    plan = split(place, "1f1b", 1, 2, zero=3)
    whole: list[int] = []
    use, update = OwnedWeights.use, Stage.update

    def using(self: OwnedWeights, segment: int, rows: tuple[torch.Tensor, ...]) -> None:
        use(self, segment, rows)
        whole.append(sum(weight.nbytes for weight in self.gathered.values()))

    def updating(self: Stage, *args: Any, **options: Any) -> None:
        assert not self.owned.gathered
        assert all(self.parameters[name] is self.owned.weights[name] for name in self.owned.stored)
        update(self, *args, **options)

    monkeypatch.setattr(OwnedWeights, "use", using)
    monkeypatch.setattr(Stage, "update", updating)
    held(place, plan)
    graph = place.captured.graph
    readers = Counter(name for op in graph.ops for name in op.parameters)
    residences = residences_of(plan, graph)
    assert {readers[n] for n, own in residences.items() if not own.is_gathered} == {2}, "a tape would hold each copy"
    every = sum(parameter.num_bytes for parameter in graph.parameters.values())
    assert 0 < max(whole) < every / 3


@pytest.mark.parametrize("model", ["gpt2", "bert_classifier"])
def test_what_is_cast_before_use_is_cast_before_it_is_gathered(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(weight_segments, "LEAST", 1)
    place, sent = bench(model), {}
    for precision in ("fp32", "bf16"):
        plan = split(place, "1f1b", 1, 2, zero=3, precision=precision)
        gathers = [exchange for exchange in plan.exchanges if exchange.kind == WEIGHT_FORWARD]
        sent[precision] = sum(exchange.num_bytes for exchange in gathers)
    held(place, plan)
    cast = [name for name, own in residences_of(plan, place.captured.graph).items() if own.cast]
    saved = sum(place.captured.graph.parameters[name].num_bytes // 2 for name in cast)
    assert sent["fp32"] - sent["bf16"] == saved > sent["fp32"] / 3


def test_less_is_predicted_to_be_held_with_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_segments, "LEAST", 1)
    place = bench("gpt2")
    held_by = []
    for zero in (0, *LEVELS):
        plan = split(place, "1f1b", 1, 2, zero=zero)
        stages = [0] * plan.num_stages
        (estimate, _) = estimate_memory(plan, stages)
        held_by.append((estimate.weights, estimate.gradients))
    (weights, gradients), one, two, three = held_by
    assert one == (weights, gradients)
    assert two[0] == weights
    assert two[1] < 0.8 * gradients
    assert three[0] < 0.8 * weights
    assert three[1] == two[1]
    older = {zero: estimate_memory(split(place, "pipedream", 2, 2, zero=zero), [0, 0])[0] for zero in (2, 3)}
    assert 0 < older[3].versions < 0.8 * older[2].versions, "parts of versions are kept"


def test_gradients_are_held_as_parts() -> None:
    place = bench("mlp")
    found: dict[int, dict[str, int]] = {}

    for zero in (1, 2):
        plan = split(place, "1f1b", 1, 2, zero=zero)
        with mock.patch.object(Gradients, "square", autospec=True, side_effect=seen(found.setdefault(zero, {}))):
            place.verify(replace(plan, clip=Clip.parse("global:1")), steps=1)
    assert found[1]["whole"] > 0
    assert found[2]["whole"] == 0
    assert found[2]["parts"] <= 0.6 * found[1]["whole"]


def seen(sizes: dict[str, int]) -> Callable[[Gradients], float]:
    """Notes how many numbers the sums have just before an update, of parameters that are split, and of parts."""
    square = Gradients.square

    def note(self: Gradients) -> float:
        every = {name for bucket in (self._due, *self._made) if bucket is not None for name in bucket.shapes}
        sizes["whole"] = sum(t.untyped_storage().nbytes() for n, t in self._sums.items() if n in every)
        sizes["parts"] = sum(tensor.nbytes for tensor in self._parts.values())
        return square(self)

    return note


@pytest.mark.parametrize("zero", LEVELS)
def test_a_batch_with_fewer_rows_than_replicas_leaves_some_without_any(zero: int) -> None:
    entry = ZOO["mlp"]
    full = entry.batches(0, 4)
    short = [tuple(part[:count] for part in batch) for batch, count in zip(full, (1, 3, 1, 4), strict=True)]
    place = Bench(entry, None, [tuple(part[:4] for part in full[0]), *short])  # type: ignore[arg-type]
    held(place, split(place, "1f1b", 1, 3, zero=zero), steps=5)


@pytest.mark.parametrize("optimizer", [partial(AdamW, lr=1e-3), partial(SGD, lr=0.1, momentum=0.9)])
def test_it_trains_what_replicas_with_whole_states_train(optimizer: Callable[..., Any]) -> None:
    place = bench("gpt2")
    plan = split(place, "1f1b", 2, 2)
    one = trained(place, split(place, "1f1b", 2, 2, zero=0), optimizer, 4)
    other = trained(place, plan, optimizer, 4)
    assert one.micro_losses == other.micro_losses
    for name, weight in one.snapshot.parameters.items():
        assert torch.equal(other.snapshot.parameters[name], weight), name
        for key, value in one.snapshot.optimizer.get(name, {}).items():
            assert torch.equal(torch.as_tensor(other.snapshot.optimizer[name][key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("way", [*WAYS, *EXCHANGE_WAYS, STALE_GATHER])
@pytest.mark.parametrize("zero", LEVELS)
def test_tampering_is_found(way: str, zero: int) -> None:
    place = bench("dropout_heavy" if way == "rng" else "mlp")
    plan = split(place, "pipedream", 2, 3, zero=zero)
    if (way == STALE_GATHER and zero < 3) or (way in ("stash", "s") and zero == 3):
        with pytest.raises(UsageError, match="weights of which each replica stores"):
            place.verify(plan, tamper=way)
    else:
        assert not place.verify(plan, tamper=way).equal


@pytest.mark.parametrize("transport", ["memory", "gloo"])
@pytest.mark.parametrize(("replicas", "zero"), [(3, 1), (3, 2), (3, 3), ("2x2", 3)])
def test_every_worker_sends_the_bytes_that_the_plan_says(transport: str, replicas: int | str, zero: int) -> None:
    place = Bench(ZOO["gpt2"], None, ZOO["gpt2"].batches(0, 3))
    fields = {"micro_batches": 1} if replicas == "2x2" else {"zero": zero}  # a row for each
    plan = split(place, "1f1b", 1, replicas, transport=transport, **fields)
    done = trained(place, plan, partial(SGD, lr=0.1), 3)
    channels = {channel.id: channel for channel in channels_of(read(plan))}
    kinds = set()
    for number, exchange in exchanges_of(read(plan), channels_of(read(plan))).items():
        holders = channels[number].sources
        kinds.add((exchange.kind, tuple(map(str, exchange.phases))))
        for position, port in enumerate(holders):
            times = 3 * (plan.micro_batches if exchange.kind in (GRADIENT_PARTS, *USED) else 1)
            predicted = times * sum(exchange.bytes_sent(len(holders), position))
            assert done.workers[port.worker]["bytes_sent"][str(number)] == predicted, str(channels[number])
    of_gradients = GRADIENT_PARTS if zero > 1 else "weight-gradient"
    assert {(of_gradients, ("reduce-scatter(0)",)), ("weight", ("all-gather(0)",))} <= kinds


def test_parts_of_any_sizes_are_scattered_and_gathered() -> None:
    shapes = {"a": (5, 3), "b": (7,), "c": (2, 6), "d": (3, 3)}
    splits = {"a": Split(0), "b": Split(0), "c": Split(1, 2), "d": Split(1)}
    whole = {name: torch.randn(shape, dtype=torch.float64 if name == "b" else None) for name, shape in shapes.items()}
    bucket = StateBucket.of(whole.items(), splits, 3)
    rows = bucket.scattered(whole)
    assert [tuple(row.shape) for row in rows] == list(bucket.rows)
    parts = [bucket.own(tuple(row[r : r + 1] for row in rows), r) for r in range(3)]
    assert sum(part["a"].numel() for part in parts) == 15
    packed = [bucket.packed(part) for part in parts]
    gathered = bucket.gathered(tuple(torch.cat(rows) for rows in zip(*packed, strict=True)))
    assert all(torch.equal(gathered[name], tensor) for name, tensor in whole.items())


# --- checkpoints


def trip_of(rule: str, replicas: int | str, zero: int, model: str = "gpt2") -> Trip:
    place = bench(model)
    plan = split(place, rule, 2, replicas, **({} if isinstance(replicas, str) else {"zero": zero}))
    return Trip(place.job, place.captured, plan, Length(steps=6), place.restore)


@pytest.mark.parametrize(
    ("rule", "replicas", "zero"),
    [
        *(("1f1b", 2, level) for level in LEVELS),
        *(("pipedream", 2, level) for level in LEVELS),
        *(("pipeoptim", 2, 3), ("pipedream", "2x2", 3)),
    ],
)
def test_a_run_goes_on_from_every_checkpoint_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, replicas: int | str, zero: int
) -> None:
    trip = trip_of(rule, replicas, zero)
    with every_checkpoint(monkeypatch, tmp_path):
        whole = trip.whole(Saving(path=tmp_path, every=1))
    for updates in range(1, 6):
        start = load(tmp_path / str(updates))
        told: list[Event] = []
        assert differences(whole, trip.rest(start, told), start) == []
        assert not [event for event in told if isinstance(event, Drained)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *[((2, 1), (2, 0)), ((2, 0), (2, 1)), ((2, 1), (3, 1)), ((2, 2), (3, 2)), ((3, 3), (2, 3)), ((2, 3), (2, 2))],
        *[(("2x2", 3), (3, 3)), ((2, 3), ("2x2", 3))],
    ],
)
def test_other_replicas_read_the_same_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[Any, int], after: tuple[Any, int]
) -> None:
    with every_checkpoint(monkeypatch, tmp_path):
        whole = trip_of("1f1b", *before).whole(Saving(path=tmp_path, every=1))
    done = trip_of("1f1b", *after).rest(load(tmp_path / "3"))
    same = before[0] == after[0]
    for name, weight in whole.snapshot.parameters.items():
        got = done.snapshot.parameters[name]
        assert torch.equal(got, weight) if same else got.shape == weight.shape, name


def test_each_replica_writes_its_part(tmp_path: Path) -> None:
    sizes = []
    for zero in (0, 1):
        folder = tmp_path / str(zero)
        trip_of("1f1b", 2, zero).whole(Saving(path=folder))
        sizes.append([file.stat().st_size for file in folder.glob("*.safetensors")])
    assert sum(sizes[1]) < 1.2 * sum(sizes[0])
    assert max(sizes[1]) < 0.6 * max(sizes[0])


@pytest.mark.parametrize(
    ("replicas", "given", "kept"),
    [
        ("2x2", {}, {"hybrid": "2x2", "devices": "cpu,cpu,cpu,cpu"}),
        ("2x2", {"data_parallel": 3}, {"zero": 3}),
        ("2x2", {"data_parallel": 1}, {"zero": 0}),
        ("2x2", {"zero": 1}, {"data_parallel": 4, "zero": 3, "devices": "cpu,cpu,cpu,cpu"}),
        (4, {"hybrid": "2x2"}, {"devices": "cpu,cpu,cpu,cpu"}),
        (4, {"hybrid": "2x3"}, {}),
        (4, {}, {"data_parallel": 4, "zero": 1, "devices": "cpu,cpu,cpu,cpu"}),
    ],
)
def test_a_run_that_goes_on_takes_over_how_many_hold_a_stage(
    replicas: int | str, given: dict[str, Any], kept: dict[str, Any]
) -> None:
    plan = split(bench("mlp"), "1f1b", 1, replicas, ema=0.5)
    found = inherited(plan, Choices(**given)).given()
    assert {name: found.get(name) for name in ("data_parallel", "zero", "hybrid", "devices")} == {
        name: kept.get(name, plan.replicas if name == "data_parallel" and "data_parallel" in given else None)
        for name in ("data_parallel", "zero", "hybrid", "devices")
    }
    assert found["ema"] == 0.5


# --- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, clip=Clip.parse("stage:1")), "clip of the plan, with split states"),
        (lambda plan: replace(plan, states={"nobody": (("replicas", parse("S(0)")),)}), "no parameter of this name"),
        (
            lambda plan: replace(plan, states={"*": (("rows", parse("S(0)")),)}),
            "each at most once, of the mesh: replicas",
        ),
        (lambda plan: replace(plan, states={"*": (("replicas", parse("S(3)")),)}), "a split of one of its dimensions"),
        (lambda plan: replace(plan, states={}), "exchanges of the plan"),
        (lambda plan: replace(plan, sharded=("gradients",)), "sharded of the plan"),
        (lambda plan: replace(plan, sharded=("states", "gradients")), "exchanges[1] of the plan"),
    ],
)
def test_a_plan_whose_states_do_not_fit_is_refused(change: Callable[[Plan], Plan], message: str) -> None:
    place = bench("mlp")
    with pytest.raises(PlanError) as refused:
        place.verify(change(split(place, "1f1b", 1, 2)))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("rule", "replicas", "fields", "message"),
    [
        ("rehearse", 2, {"stages": 2}, "predictor of the plan, with split states"),
        ("pipeoptim", 2, {"backward": "recompute", "stages": 2}, "backward of the plan, with split states"),
        ("1f1b", 1, {}, "--zero 1: got one replica"),
        ("1f1b", 60, {}, "--zero 1: got no parameter with a dimension as long as the 60 replicas"),
        ("1f1b", "2x60", {}, "--hybrid 2x60: got no parameter with a dimension as long as the 60 replicas"),
        ("1f1b", 2, {"zero": 4}, "--zero: got 4; expected 0 to 3"),
        ("1f1b", "2x1", {}, "--hybrid: got 2x1; expected RxS"),
        ("1f1b", "2x2", {"data_parallel": 2}, "--hybrid 2x2 with --data-parallel: got both"),
        ("1f1b", "2x2", {"zero": 3}, "--hybrid 2x2 with --zero: got both"),
        ("pipedream", 2, {"zero": 3, "precision": "fp16"}, "precision of the plan, with split states"),
        ("1f1b", 2, {"zero": 3, "backward": "recompute"}, "backward of the plan, with split states"),
        ("1f1b", 2, {"zero": 3, "compile": True}, "compile of the plan, with split states"),
    ],
)
def test_what_cannot_be_split_is_refused(rule: str, replicas: int, fields: dict[str, Any], message: str) -> None:
    place = bench("mlp")
    with pytest.raises(PlanError) as refused:
        split(place, rule, fields.pop("stages", 1), replicas, **fields)
    assert message in str(refused.value)


def test_an_optimizer_that_looks_at_whole_tensors_is_refused() -> None:
    place = bench("gpt2")
    with pytest.raises(JobError, match=r"Adafactor.* of each a worker has a part"):
        place.verify(split(place, "1f1b", 1, 2), place.job(lambda named: Adafactor(named, lr=1e-3)))
