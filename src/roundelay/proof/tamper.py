"""Breaks a run on purpose, to show that ``verify`` reports it.

Each way but the orders of sums replaces handlers of one stage, of its last holder, by ones that do something wrong:

==================  ==========================================================================
``stash``           backward differentiates at the weights of the version before
``s``               forward reads weights predicted one update too far
``order``           the update happens after the next forward instead of before it
``rng``             forward draws the random numbers of another seed
``drop-update``     the run's second update is left out
``box``             the holder goes on with what it has itself: an exchange is left out
``stale-shard``     one holder's part of what is exchanged is that of the exchange before
``exchange-order``  what the holders have is summed in another order
``stale-gather``    one holder's first forward after an update has the weights gathered before it
``hop``             a sum of gradients is handed on without what the holder should add
``stale-sum``       an update is made with the sums of the batch before
``sum-order``       gradients are summed in another order
==================  ==========================================================================

The last three are for the layouts of cyclic data parallelism. Where one holder makes the updates of all, it is broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from roundelay.actor.machine import Run
from roundelay.errors import UsageError, counted
from roundelay.frontend import RngKey
from roundelay.ir.exchange import USED
from roundelay.ir.graph import Graph
from roundelay.ir.mesh import REPLICAS
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.ir.program import Channel, Program
from roundelay.ir.sbp import Split, bounds
from roundelay.ir.stage import Partition
from roundelay.lower.reading import read
from roundelay.proof.tamper_sums import tampered_sums
from roundelay.proof.tamper_ways import BOX, HOP, ORDER, STALE_GATHER, STALE_SHARD, SUM_ORDER, SUM_WAYS, WAYS
from roundelay.runtime.collectives import Parts
from roundelay.runtime.handlers import DUE, HANDLERS, USED_WEIGHTS, Context, Handler, do_forward, do_unbox, do_update


class _Worker:
    """Handlers that do what they should; each way to break a run overrides some of them."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}  # the weights before the last update

    def forward(self, context: Context, run: Run) -> MicroBatch | None:
        return do_forward(context, run)

    def update(self, context: Context, run: Run) -> MicroBatch | None:
        self.before = {name: weight.detach().clone() for name, weight in context.stage.live().items()}
        return do_update(context, run)

    def unbox(self, context: Context, run: Run) -> MicroBatch | None:
        return do_unbox(context, run)


class _Stash(_Worker):
    """Backward at the weights before the last update."""

    def forward(self, context: Context, run: Run) -> MicroBatch | None:
        stage = context.stage
        buffers = dict(stage.buffers)
        inputs: dict[str, object] = dict(context.values.get(run.g, {}))
        for channel, _ in run.takes:
            inputs |= zip(context.edges[channel][1].values, context.inbox[channel, run.g].values, strict=True)
        result = do_forward(context, run)
        if self.before:
            part = stage.part_of(run)
            known = {name: inputs[name] for name in part.inputs}
            _, stage.tapes[run.g][-1] = part.forward(
                self.before, buffers, known, RngKey(context.seed, _number(run)), mode="stash"
            )
        return result


class _TooFar(_Worker):
    """Forward at weights predicted one update too far."""

    def forward(self, context: Context, run: Run) -> MicroBatch | None:
        stage = context.stage
        right = stage.weights(run)
        if self.before:
            wrong = {n: w.detach() + (stage.live()[n].detach() - self.before[n]) for n, w in right.items()}
            stage.forward_weights = wrong
        result = do_forward(context, run)
        stage.forward_weights = None
        return result


class _Late(_Worker):
    """The update after the next forward instead of before it."""

    waiting: Run | None = None
    over = False

    def forward(self, context: Context, run: Run) -> MicroBatch | None:
        context.stage.forward_weights = None if self.waiting is None else context.stage.live()
        result = do_forward(context, run)
        context.stage.forward_weights = None
        if self.waiting is not None:
            do_update(context, self.waiting)
            self.waiting = None
        self.over = run.header is not None and bool(run.header.final)
        return result

    def update(self, context: Context, run: Run) -> MicroBatch | None:
        if self.over or (run.header is not None and run.header.final):  # no forward follows
            if self.waiting is not None:  # nor did one, if this replica had no more rows
                do_update(context, self.waiting)
                self.waiting = None
            return do_update(context, run)
        self.waiting = run
        return None


class _OtherSeed(_Worker):
    """Forward with the random numbers of another seed."""

    def forward(self, context: Context, run: Run) -> MicroBatch | None:
        seed = context.seed
        context.seed = seed + 1
        try:
            return do_forward(context, run)
        finally:
            context.seed = seed


class _Dropped(_Worker):
    """The second update of the run is left out."""

    updates = 0

    def update(self, context: Context, run: Run) -> MicroBatch | None:
        before = {name: weight.detach().clone() for name, weight in context.stage.owned.weights.items()}
        result = do_update(context, run)
        self.updates += 1
        if self.updates == 2:
            for name, parameter in context.stage.owned.weights.items():
                parameter.data = before[name]
        return result


class _Unboxed(_Worker):
    """An exchange is left out: of gradients, or the stage's first one of a value that keeps its shape."""

    left_out: int | None = None

    def unbox(self, context: Context, run: Run) -> MicroBatch | None:
        (channel, _), *_ = run.takes
        boxing = context.boxings.get(channel)
        if boxing is not None and Split in (type(boxing.source), type(boxing.target)):
            return do_unbox(context, run)
        if context.axes[channel].startswith(USED_WEIGHTS):
            return do_unbox(context, run)  # without its weights nothing can go on
        counts = boxing is None and context.axes[channel] == REPLICAS
        if counts and context.stage.owned.split and len(context.inbox[channel, run.g].values) < 2:
            return do_unbox(context, run)  # there is no gradient in it
        self.left_out = channel if self.left_out is None else self.left_out
        if channel != self.left_out:
            return do_unbox(context, run)
        if context.axes[channel] == DUE:
            context.stage.gradients.keep_own()
        del context.inbox[channel, run.g]
        context.shapes.pop(channel, None)
        return None


class _Stale(_Worker):
    """A part of what is exchanged is that of the exchange before."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, Parts] = {}

    def unbox(self, context: Context, run: Run) -> MicroBatch | None:
        key = run.takes[0][0], run.g
        message, last = context.inbox[key], self.last.get(key[0], ())
        parts: Parts = message.values  # type: ignore[assignment]
        if last and parts and last[0].shape == parts[0].shape:
            _, end = bounds(len(parts[0]), 2)[0]
            context.inbox[key] = message._replace(values=(torch.cat([last[0][:end], parts[0][end:]]), *parts[1:]))
        self.last[key[0]] = tuple([part.clone() for part in parts])
        return do_unbox(context, run)


class _OldWeights(_Worker):
    """The first weights that are gathered after an update are those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, tuple[int, dict[str, torch.Tensor]]] = {}

    def unbox(self, context: Context, run: Run) -> MicroBatch | None:
        known = {*context.stage.owned.gathered}
        result = do_unbox(context, run)
        axis = context.axes[run.takes[0][0]]
        if axis.startswith(USED_WEIGHTS) and run.header is not None and run.header.rows:
            gathered = context.stage.owned.gathered
            version, before = self.last.get(axis, (run.version, {}))
            self.last[axis] = run.version, {name: w for name, w in gathered.items() if name not in known}
            gathered |= before if version < run.version else {}
        return result


_CLASSES: dict[str, type[_Worker]] = dict(zip(WAYS, (_Stash, _TooFar, _Late, _OtherSeed, _Dropped), strict=True))

_EXCHANGES: dict[str, type[_Worker]] = {BOX: _Unboxed, STALE_SHARD: _Stale, STALE_GATHER: _OldWeights}


def tampered_handlers(way: str, plan: Plan, stage: int) -> dict[str, Handler]:
    """Handlers of a stage that break a run: in the last of its holders, or in the one that makes its updates."""
    if way == ORDER:
        return {}
    holders, updater = len(plan.stages[stage].workers), read(plan).updater(stage)
    victim = holders - 1 if updater is None else updater
    if way in SUM_WAYS:
        wrong = tampered_sums(way, holders, several=plan.micro_batches > 1 and holders == 1)
        victim = holders - 1 if way == HOP else victim
    else:
        broken = (_CLASSES | _EXCHANGES)[way]()
        wrong = {"forward": broken.forward, "update": broken.update, "unbox": broken.unbox}

    def in_victim(opcode: str) -> Handler:
        return lambda context, run: (wrong if context.stage.holder == victim else HANDLERS)[opcode](context, run)

    return wrong if way == SUM_ORDER else {opcode: in_victim(opcode) for opcode in wrong}


def tampered_programs(way: str, programs: Sequence[Program], stage: int) -> tuple[Program, ...]:
    """The programs, with the holders of a stage in reverse order where the way says so."""

    def reversed_at(channel: Channel) -> Channel:
        if not channel.phases or channel.sources[0].stage != stage:
            return channel
        return replace(channel, sources=channel.sources[::-1], targets=channel.targets[::-1])

    if way != ORDER:
        return tuple(programs)
    return tuple([replace(program, channels=tuple(map(reversed_at, program.channels))) for program in programs])


def _number(run: Run) -> int:
    assert run.header is not None
    return run.header.number


def tampered_stage(way: str, graph: Graph, stages: Partition, batches: int | None, plan: Plan) -> int:
    """The stage to break: the last one at which the way makes a difference.

    Args:
        way: one of :data:`WAYS` or :data:`EXCHANGE_WAYS`.
        graph: of the model.
        stages: its stages.
        batches: updates of the run; None if their number is not known.
        plan: has the holders of stages, and the micro-batches.

    Raises:
        UsageError: the way makes no difference anywhere.
    """
    _check_sums(way, plan)
    _check_gathers(way, plan)
    along = 1 if read(plan).sums_over_time else max(plan.replicas, *plan.mesh.values(), 1)
    least = {ORDER: 3} | dict.fromkeys(_EXCHANGES, 2)
    if along < least.get(way, 1):
        raise UsageError(
            f"--tamper {way}",
            got=counted(along, "holder") + " of a stage",
            expected=f"at least {least[way]}, whose tensors are summed in some order",
            remedy=f"Give --data-parallel {least[way]}, or another way to tamper.",
        )
    if way not in ("rng", "box", ORDER) and batches == 1:
        raise UsageError(
            f"--tamper {way}",
            got="a run of one update, in which it changes nothing",
            expected="at least two updates",
            remedy="Give --steps 2 or more.",
        )
    for spec in reversed(stages.stages):
        draws = any(op.draws >= 0 for part in spec.segments for op in graph.ops[part.start : part.stop])
        trains = any(graph.parameters[n].trainable for n in spec.parameters)
        trains = trains and (way != SUM_ORDER or _added(plan, spec.stage) > 2)
        if draws if way == "rng" else trains:
            return spec.stage
    raise UsageError(
        f"--tamper {way}",
        got="a model that " + ("draws no random numbers" if way == "rng" else "has no trainable parameter"),
        expected="a model on which it makes a difference",
        remedy="Choose another way to tamper.",
    )


def _check_gathers(way: str, plan: Plan) -> None:
    """Refuse a way to tamper with gathered weights where none are, and one that takes them for whole where they are.

    Raises:
        UsageError: the plan stores weights otherwise.
    """
    gathers = any(exchange.kind in USED for exchange in plan.exchanges)
    if (way == STALE_GATHER and not gathers) or (way in ("stash", "s") and gathers):
        raise UsageError(
            f"--tamper {way}",
            got="weights of which each replica stores " + ("a part" if gathers else "all"),
            expected="weights that are " + ("whole" if gathers else "gathered before each use"),
            remedy="Give --tamper stale-gather." if gathers else "Give --zero 3, or another way to tamper.",
        )


def _added(plan: Plan, stage: int) -> int:
    """How many sums of a stage are added one after another: of micro-batches, or of holders."""
    return max(plan.micro_batches if len(plan.stages[stage].workers) == 1 else 1, len(plan.stages[stage].workers))


def _check_sums(way: str, plan: Plan) -> None:
    """Refuse a way to tamper with sums where they are not made so.

    Raises:
        UsageError: the plan has another layout, or too few gradients are added.
    """
    if way not in SUM_WAYS:
        return
    form = read(plan).form
    sums = form is not None and form.staggered and (way != HOP or form.sums)
    if not sums or (way == SUM_ORDER and plan.batch_parts < 3):
        raise UsageError(
            f"--tamper {way}",
            got=f"layout {plan.layout} of {counted(plan.batch_parts, 'micro-batch')}",
            expected="a layout of cyclic data parallelism"
            + (" of 3 micro-batches or more" if way == SUM_ORDER else "")
            + (", other than single, in which holders hand on sums" if way == HOP else ""),
            remedy="Give --layout dp --micro-batches 3, or another way to tamper.",
        )
