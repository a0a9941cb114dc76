"""What a search chooses from: complete choices, each of which a person could have given. No torch is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from roundelay.ir.device_names import CPU
from roundelay.ir.rule import rule_named
from roundelay.ir.transports import TRANSPORTS
from roundelay.planner.cost_model import boundaries_of
from roundelay.planner.draft_plan import NO_MODULES, PLAIN, default_rule
from roundelay.planner.holder_choices import parts_of, replicas_of
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.source import Hardware
from roundelay.planner.stage_counts import default_devices
from roundelay.schedules import LAYOUTS, PIPELINE, form_for, schedule_named

ALIKE = (PLAIN, "zb-h1", "zb-v")
"""Rules that train as plain PyTorch does. GPipe's schedule takes the time of 1f1b, and holds more."""

LEVELS = (0, 1, 2, 3)
"""Of ZeRO."""

ALONE = "one process"
"""The family of plans of one worker."""

MOST_EACH = 8
"""Micro-batches of a batch for each stage, at most."""

EVERY_COUNT = 8
"""Up to so many workers every smaller number is tried too; beyond, its halves."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many workers do what.

    Args:
        replicas: R.
        parts: of a mesh, T.
        workers: of a replica, each with a stage or several.
    """

    replicas: int
    parts: int
    workers: int


def space(given: Choices, facts: ModelFacts, machine: Hardware, workers: int) -> tuple[Choices, ...]:
    """All choices that contain the given ones, on at most so many workers, in an order that is always the same.

    Args:
        given: pins; its `workers` is not among them.
        facts: of the model.
        machine: where the plan will run.
        workers: in all.
    """
    pinned = replace(given, workers=None)
    every = [*_in_pipelines(pinned, facts, machine, workers), *_in_layouts(pinned, facts, machine, workers)]
    return tuple(dict.fromkeys(point for point in every if point.over(pinned) == point))


def family(choices: Choices) -> str:
    """What kind of plan it is, in words: of each the best is worth a look."""
    if choices.layout not in (None, PIPELINE):
        return f"layout {choices.layout}"
    states = "hybrid" if choices.hybrid else "ZeRO" if choices.zero else "data parallel"
    kinds = [(states, replicas_of(choices)), ("tensor parallel", parts_of(choices)), ("pipeline", choices.workers or 1)]
    return " + ".join(name for name, size in kinds if size > 1) or ALONE


def transports_of(given: Choices, machine: Hardware) -> tuple[str, ...]:
    """Those that may carry the messages between the workers, on this host or on several nodes."""
    if given.transport is not None:
        return (given.transport,)
    if machine.cluster is not None and machine.cluster.most_on_a_node < len(machine.cluster.workers):
        return ("gloo",)
    named = (given.devices or default_devices(machine, "memory")).split(",")
    on_cpu = all(one.strip() == CPU for one in named)
    return tuple(name for name, row in TRANSPORTS.items() if name == "memory" or (on_cpu and name == "shm"))


def _in_pipelines(given: Choices, facts: ModelFacts, machine: Hardware, workers: int) -> Iterator[Choices]:
    if given.layout not in (None, PIPELINE):
        return
    for sizes in sizes_of(given, workers):
        if sizes.replicas > 1 and not _may_deal(given, facts):
            continue
        for rule in _rules(given, sizes):
            if sizes.workers * max(1, schedule_named(rule_named(rule).schedule).stages_per_worker) > _pieces(facts):
                continue
            for states in _states(given, sizes):
                for micro_batches in _micro_batches(given, rule, sizes, facts):
                    for recompute in (NO_MODULES, "all") if given.recompute is None else (given.recompute,):
                        yield from _carried(given, machine, sizes, rule, states, micro_batches, recompute)


def _carried(
    given: Choices,
    machine: Hardware,
    sizes: Sizes,
    rule: str,
    states: Choices,
    micro_batches: int | None,
    recompute: str | Sequence[str],
) -> Iterator[Choices]:
    """The choices over each transport: a worker alone sends nothing."""
    alone = sizes == Sizes(1, 1, 1) and given.signatures is None
    for transport in transports_of(given, machine)[: 1 if alone else None]:
        yield replace(
            states.over(given),
            workers=sizes.workers,
            tensor_parallel=sizes.parts if sizes.parts > 1 else given.tensor_parallel,
            rule=rule,
            micro_batches=micro_batches,
            recompute=recompute,
            transport=transport,
        )


def _may_deal(given: Choices, facts: ModelFacts) -> bool:
    """Whether replicas train the same, as a batch's loss is the mean of its parts'; or were asked for."""
    asked = given.names() & {"data_parallel", "zero", "hybrid", "layout"}
    return bool(asked) or all(one.kind == "mean" for one in facts.divisible.values())


def _pieces(facts: ModelFacts) -> int:
    return len(boundaries_of(facts.graph)) - 1


def counts_of(workers: int) -> list[int]:
    """How many workers are tried, the most first."""
    if workers <= EVERY_COUNT:
        return [*range(workers, 0, -1)]
    halves = [workers >> k for k in range(workers.bit_length())]
    return list(dict.fromkeys(halves))


def sizes_of(given: Choices, workers: int) -> Iterator[Sizes]:
    """All ways to divide up to so many workers into replicas, parts and stages."""
    for count in counts_of(workers):
        for replicas in _divisors(count):
            for parts in _divisors(count // replicas):
                sizes = Sizes(replicas, parts, count // replicas // parts)
                if _agrees(given, sizes):
                    yield sizes


def _agrees(given: Choices, sizes: Sizes) -> bool:
    if given.signatures is not None and sizes.parts > 1:
        return False
    pins = [(given.data_parallel, sizes.replicas), (given.tensor_parallel, sizes.parts)]
    return all(pin in (None, size) for pin, size in pins)


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _rules(given: Choices, sizes: Sizes) -> Sequence[str]:
    if given.rule is not None:  # of one that reads older weights a stage alone is another
        return (given.rule,) if sizes.workers > 1 or _flushes(given.rule) else ()
    return ALIKE if sizes.workers > 1 else ALIKE[:1]


def _states(given: Choices, sizes: Sizes) -> Iterator[Choices]:
    """What replicas hold: all, or parts of it."""
    if given.hybrid is not None or sizes.replicas == 1:
        if given.hybrid is None or _product(given.hybrid) == sizes.replicas:
            yield Choices(data_parallel=sizes.replicas if sizes.replicas > 1 and given.hybrid is None else None)
        return
    for level in LEVELS if given.zero is None else (given.zero,):
        yield Choices(data_parallel=sizes.replicas, zero=level or given.zero)
    if given.zero is None and given.data_parallel is None:
        for groups in _divisors(sizes.replicas)[1:-1]:
            yield Choices(hybrid=f"{groups}x{sizes.replicas // groups}")


def _product(hybrid: str) -> int:
    groups, _, shards = hybrid.partition("x")
    return int(groups) * int(shards) if groups.isdecimal() and shards.isdecimal() else 0


def _micro_batches(given: Choices, rule: str, sizes: Sizes, facts: ModelFacts) -> Sequence[int | None]:
    """Numbers of micro-batches that train the same: of a rule that flushes, where a loss is the mean of its parts'."""
    stages = sizes.workers
    if given.micro_batches is not None:
        return (given.micro_batches,)
    if not _flushes(rule):
        return (None,)
    alike = all(one.kind == "mean" for one in facts.divisible.values())
    if not alike or not facts.divisible:
        return (1,)
    most = max(1, facts.graph.sample_rows // facts.graph.min_rows // sizes.replicas)
    powers = [1 << k for k in range((MOST_EACH * stages).bit_length())]
    wanted = {1, *powers, *(stages * factor for factor in (1, 2, 4, MOST_EACH))} if stages > 1 else {1, 2, 4, 8, 16, 32}
    return sorted(number for number in wanted if number <= min(most, MOST_EACH * max(4, stages)))


def _flushes(rule: str) -> bool:
    """Whether a rule reads no older weights, however many stages and micro-batches there are."""
    row = rule_named(rule)
    return schedule_named(row.schedule).window == "batch" and row.versions != "table"


def _in_layouts(given: Choices, facts: ModelFacts, machine: Hardware, workers: int) -> Iterator[Choices]:
    """Forms of cyclic data parallelism that the rule has, of several workers; one alone if it is asked for."""
    rule = given.rule or default_rule(given.layout or PIPELINE)
    known = [name for name in LAYOUTS if given.layout in (None, name) and form_for(rule_named(rule), name) is not None]
    asked = given.layout is not None or not _flushes(rule)
    layouts = [n for n in known if asked or (LAYOUTS[n].replicates and workers > 1 and _may_deal(given, facts))]
    for layout in layouts:
        for transport in transports_of(given, machine)[: None if layout != "single" else 1]:
            size = None if LAYOUTS[layout].takes_turns or layout == "single" else workers
            number = {"data_parallel" if LAYOUTS[layout].replicates else "micro_batches": size}
            own = replace(given, layout=layout, rule=rule, transport=transport)
            yield Choices(**own.given() | {k: v for k, v in number.items() if v and own.given().get(k) is None})
