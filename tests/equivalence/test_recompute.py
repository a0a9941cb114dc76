"""Modules that backwards run again: the same bits with less kept, and by ``mixed`` the weights that it says."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import roundelay
from roundelay.errors import PlanError
from roundelay.ir.plan import Plan
from roundelay.lower.partition import partition
from roundelay.planner.memory_model import estimate_memory
from roundelay.planning.explain_plan import explain
from roundelay.session.training import Length, Session, Trained
from tests.equivalence.cells import VARIANTS, Bench, assert_same
from tests.frontend.cutting import DRAW, captured_of, differing, run, sample, weights_of
from tests.zoo.dense import class_loss
from tests.zoo.entry import Batch, Entry, built_by

WIDTH = 8
STASHING = [name for name, variant in VARIANTS.items() if variant.backward == "stash"]
FLUSHING = [
    name for name in VARIANTS if name.endswith("mixed") and name.split()[0] in ("gpipe", "1f1b", "zb-h1", "zb-v")
]
BLOCKS = ("blocks.*",)


class Block(nn.Module):
    """Statistics that a forward changes, random numbers, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.BatchNorm1d(3 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.narrow = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Rows x WIDTH to the same."""
        out: Tensor = x + self.narrow(self.dropout(nn.functional.gelu(self.norm(self.wide(x)))))
        return out


class Blocks(nn.Module):
    """Four blocks between two layers; the first layer's weight is used in the last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.still = nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, features: Tensor) -> Tensor:
        """Rows x 3."""
        hidden = self.first(features)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden + nn.functional.linear(hidden, self.first.weight.t()) @ self.first.weight.t())
        return out


def batches(seed: int, num: int, *, short: bool = False, varying: bool = False) -> list[Batch]:
    """Batches of eight rows, and a short one."""
    generator = torch.Generator().manual_seed(seed)
    rows = [8, 8, 6, 8, 8][:num]  # no micro-batch of one row, which has no variance
    return [(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in rows]


ENTRY = Entry("blocks", built_by(Blocks), batches, class_loss)


@functools.cache
def place() -> Bench:
    """The model, captured once."""
    return Bench(ENTRY)


def trained(plan: Plan) -> Trained:
    """A run from the first weights on."""
    place().restore()
    return Session(place().job(), place().captured, plan, 0, Length(steps=5)).run(notify=lambda event: None)


def planned(**choices: Any) -> Plan:
    """A plan of the model, measured."""
    place().restore()
    return roundelay.plan(place().job(), captured=place().captured, **({"cuts": "roofline"} | choices))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("variant", [*STASHING, *FLUSHING])
def test_where_both_passes_read_the_same_weights_no_bit_differs(variant: str, stages: int) -> None:
    plan = place().plan(VARIANTS[variant], stages, max(2, stages - 1))
    assert_same(trained(plan), trained(replace(plan, recompute=BLOCKS)))


@pytest.mark.parametrize("variant", ["async mixed", "pipeoptim improved mixed", "lookahead mixed", "pipedream"])
@pytest.mark.parametrize("names", [("blocks.1", "blocks.[23]"), ("all",)])
def test_a_run_equals_its_reference_and_by_mixed_it_is_another_one_than_without(
    variant: str, names: tuple[str, ...]
) -> None:
    plan = place().plan(VARIANTS[variant], 3, 2)
    found = place().verify(replace(plan, recompute=names))
    assert found.equal, found.difference
    without, with_it = trained(plan).snapshot.parameters, trained(replace(plan, recompute=names)).snapshot.parameters
    assert (differing(without, with_it) == []) == (variant == "pipedream")


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"precision": "fp16", "loss_scale": "1024"},
        {"clip": "stage:0.1"},
        {"clip": "global:0.1"},
        {"transport": "shm"},
    ],
    ids=str,
)
def test_beside_other_options_no_bit_differs(changes: dict[str, Any]) -> None:
    plan = replace(place().plan(VARIANTS["1f1b"], 2, 2), **changes)
    one, two = trained(plan), trained(replace(plan, recompute=("blocks.0", "blocks.3")))
    assert_same(one, two)
    assert two.workers[0]["tape_bytes"]["0"] < one.workers[0]["tape_bytes"]["0"]


@pytest.mark.parametrize("rule", ["1f1b", "zb-h1", "pipedream", "async"])
def test_the_bytes_that_tapes_hold_are_fewer_and_those_that_the_plan_foretells(rule: str) -> None:
    plans = [planned(rule=rule, workers=2, micro_batches=2, recompute=names) for names in ((), BLOCKS)]
    assert [plan.recompute for plan in plans] == [(), BLOCKS]
    for plan in plans:
        told = [data["tape_bytes"][str(k)] for k, data in sorted(trained(plan).workers.items())]
        assert told == [stage.tape_bytes for stage in plan.stages]
    for without, with_it in zip(*(plan.stages for plan in plans), strict=True):
        assert with_it.tape_bytes < 0.6 * without.tape_bytes
    for without, with_it in zip(*(estimate_memory(plan, [0, 0]) for plan in plans), strict=True):
        assert with_it.tapes < 0.7 * without.tapes


class Saved:
    """One tensor that autograd has saved, for as long as it does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


@pytest.mark.parametrize("name", ["gpt2", "batchnorm", "lstm"])
def test_nothing_that_autograd_has_saved_outlives_the_forward(name: str) -> None:
    captured, batch = captured_of(name), sample(name, 7)
    alive: list[int] = []
    for names in ((), ("all",)):
        spec = replace(partition(captured.graph, [[captured.graph.ops[-1].name]], names).stages[0], loss_reads=())
        stage, saved = captured.stage(spec), weakref.WeakSet[Saved]()

        def pack(tensor: Tensor, saved: weakref.WeakSet[Saved] = saved) -> Saved:
            saved.add(one := Saved(tensor))
            return one

        buffers = {n: b.clone() for n, b in captured.buffers().items()}
        inputs = {n: v for n, v in captured.values(batch).items() if n in captured.graph.inputs}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
            kept = stage.forward(weights_of(captured), buffers, inputs, DRAW, mode="stash")
        alive.append(len(saved))
        del kept
    assert alive[0] > 0 == alive[1]


def test_by_mixed_a_segment_is_differentiated_at_the_backward_s_weights_and_the_others_keep_activations() -> None:
    captured, batch = place().captured, batches(7, 1)[0]
    old, new = weights_of(captured, 0.05, seed=1), weights_of(captured, 0.05, seed=2)
    cut = partition(captured.graph, [[captured.graph.ops[-1].name]], ("blocks.1",))
    done = run(captured, cut, batch, old, later=new, mode="mixed")
    before, again, *after = captured.stage(replace(cut.stages[0], recomputed=())).segments
    values: dict[str, Any] = dict(captured.values(batch))
    buffers = {n: b.clone() for n, b in captured.buffers().items()}
    tapes, statistics = [], {}
    for segment in (before, again, *after):
        statistics = dict(buffers) if segment is again else statistics
        inputs = {n: values[n] for n in segment.spec.inputs}
        made, tape = segment.forward(old, buffers, inputs, DRAW, mixed=segment is not again)
        values |= made
        tapes.append((segment, tape, inputs))
    grads: dict[str, Any] = {"loss": torch.ones(())}
    wanted: dict[str, Tensor] = {}
    for segment, tape, inputs in reversed(tapes):
        if segment is again:
            tape = segment.forward(new, statistics, inputs, DRAW)[1]
        of_inputs, own = segment.backward(tape, {n: grads.pop(n, None) for n in segment.spec.outputs}, new)
        grads |= of_inputs
        wanted |= own
    assert differing(done.grads, wanted) == []
    plain = run(
        captured, partition(captured.graph, [[captured.graph.ops[-1].name]]), batch, old, later=new, mode="mixed"
    )
    assert any(name.startswith("blocks.1.") for name in differing(done.grads, plain.grads))


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"recompute": "block.0"}, "'block.0', which matches no module .* such as blocks.0"),
        ({"recompute": "still"}, "'still', which matches no module"),
        ({"recompute": "blocks.9"}, "'blocks.9', which matches no module"),
        ({"recompute": "blocks.*.*.*"}, "which matches no module"),
        ({"recompute": "all,blocks.0"}, "all, blocks.0; expected all, or names"),
        ({"recompute": "blocks.*,blocks.0"}, r"'blocks.0' \(by 'blocks.0'\) and 'blocks.0' \(by 'blocks.\*'\)"),
        ({"recompute": "blocks.0.wide,blocks.0"}, r"'blocks.0' \(by 'blocks.0'\) and 'blocks.0.wide'"),
        ({"recompute": "blocks.1,head"}, "'head', which keeps nothing but its inputs and outputs"),
        ({"recompute": "blocks.0", "backward": "recompute"}, "blocks.0 with backward = recompute"),
    ],
)
def test_a_name_that_could_not_act_is_refused(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        planned(rule="1f1b", workers=2, **choices)


def test_a_module_that_no_gradient_flows_through_is_refused() -> None:
    model = Blocks()
    model.first.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    job = replace(place().job(), model=model)
    with pytest.raises(PlanError, match=r"'blocks\.0', which no gradient flows through"):
        roundelay.plan(job, rule="1f1b", workers=2, recompute=["blocks.0", "blocks.1"])
    assert roundelay.plan(job, rule="1f1b", workers=2, recompute=["blocks.1"]).recompute == ("blocks.1",)


class Checkpointing(Blocks):
    """The same, which checkpoints two of its blocks, one by a method, and a layer that keeps nothing else."""

    def forward(self, features: Tensor) -> Tensor:
        """Rows x 3."""
        hidden: Any = checkpoint(self.first, features, use_reentrant=False)
        hidden = checkpoint(self.blocks[0], hidden, use_reentrant=False)
        hidden = checkpoint(partial(self.blocks[1].forward), hidden, use_reentrant=False)
        for block in list(self.blocks)[2:]:
            hidden = checkpoint(lambda x, block=block: block(x), hidden, use_reentrant=False)
        out: Tensor = self.head(hidden)
        return out


def test_what_the_model_itself_checkpoints_is_run_again_where_that_changes_no_bit() -> None:
    model = built_by(Checkpointing)(0)
    job = replace(place().job(), model=model)
    captured = roundelay.capture(job)
    assert captured.checkpointed == ("first", "blocks.0", "blocks.1")
    found = {}
    for name, choices in {"": {}, "none": {"recompute": "none"}, "mixed": {"backward": "mixed"}}.items():
        plan = roundelay.plan(job, captured=captured, rule="1f1b", workers=2, cuts="roofline", **choices)
        found[name] = plan, explain(captured, plan)
    assert [plan.recompute for plan, _ in found.values()] == [("first", "blocks.0", "blocks.1"), (), ()]
    assert found[""][0].stages[0].tape_bytes < 0.6 * found["none"][0].stages[0].tape_bytes
    for name in ("none", "mixed"):
        assert "recompute: not what the model checkpoints, first,blocks.0,blocks.1" in found[name][1]
    inner: Any = torch.utils.checkpoint
    assert "roundelay" not in inner._checkpoint_without_reentrant_generator.__module__


class Writing(Blocks):
    """The same, which writes what it checkpoints into a part of a tensor: no cut is legal around the second block."""

    def forward(self, features: Tensor) -> Tensor:
        """Rows x 3."""
        hidden: Any = checkpoint(self.blocks[0], self.first(features), use_reentrant=False)
        made = hidden.clone()
        made[:, :4] = checkpoint(self.blocks[1], hidden, use_reentrant=False)[:, :4]
        out: Tensor = self.head(made)
        return out


def test_what_the_model_checkpoints_and_no_cut_sets_apart_is_left_out() -> None:
    job = replace(place().job(), model=built_by(Writing)(0))
    captured = roundelay.capture(job)
    assert captured.checkpointed == ("blocks.0", "blocks.1")
    choices: dict[str, Any] = {"captured": captured, "rule": "1f1b", "workers": 2, "cuts": "roofline"}
    assert roundelay.plan(job, **choices).recompute == ("blocks.0",)
    with pytest.raises(PlanError, match=r"'blocks\.1', which cannot be cut out of the graph"):
        roundelay.plan(job, recompute="blocks.1", **choices)
