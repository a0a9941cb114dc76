"""Holders of a stage that run alike, so that a few of them stand for all.

In a pipeline the holders of a stage, its replicas and the workers of its mesh, run the same program on channels of
their own. They differ in this alone: the holder 0 of stage 0 reads, and sends the others of the stage their data; and
norms of gradients go to it and come from it. What machines do depends on programs and messages, never on timing (Kahn,
*The semantics of a simple language for parallel programming*, 1974): if one order of events ends without a deadlock,
every order does, and in each a worker runs the same instructions and reads the same versions. So

- **one of each stage** has the order of all. All can go in step, line by line: each finds the messages of its
  neighbours as the first holder finds its own, an exchange is complete when its line is over, and what goes from holder
  to holder of a stage is given and taken in one line;
- **two of each stage**, the first and another, have the times of all, where no norm travels and all are equally fast:
  the others get their data at the same time, later than the first, and each exchange, in which one of the others always
  takes part, waits for these. That the first was not the later one is checked in each
  (:mod:`roundelay.simulator.makespan`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from roundelay.ir.plan import Plan
from roundelay.ir.program import SCALARS, Channel, Program

_UNEVEN = ("data", *SCALARS)
"""Channels of which not each holder of a stage has one like it."""


def first_holders(plan: Plan) -> Plan:
    """The plan of a pipeline with the first holder of each stage alone, which exchanges with nobody."""
    stages = tuple([replace(stage, workers=stage.workers[:1]) for stage in plan.stages])
    kept = {name for stage in stages for name in stage.workers}
    workers = tuple([worker for worker in plan.workers if worker.name in kept])
    return replace(plan, replicas=1, mesh={}, shards=0, workers=workers, stages=stages)


def equally_fast(plan: Plan) -> bool:
    """Whether the holders of each stage compute it in the same time."""
    return all(len({plan.workers[worker].speed for worker in plan.holders(k)}) == 1 for k in range(plan.num_stages))


def run_alike(programs: Sequence[Program], firsts: Sequence[Program]) -> bool:
    """Whether each program is that of the first holder of its stages but for workers and the numbers of channels.

    All ends must know a channel alike, too. One that not each holder has must be given and taken in the same lines, and
    if it joins two stages, there must be one like it between the first holders.

    Args:
        programs: of all workers.
        firsts: those of :func:`first_holders`.
    """
    known = {(program.worker, channel.id): channel for program in programs for channel in program.channels}
    shapes, places = {program.stages: _shape(program) for program in firsts}, dict[int, int]()
    numbered = [(c, n) for program in programs for n, c in enumerate(_even(program)) if c.phases]
    return (
        all(_shape(program) == shapes.get(program.stages) for program in programs)
        and all(places.setdefault(channel.id, n) == n for channel, n in numbered)
        and all(known.get((port.worker, c.id)) == c for c in known.values() for port in (*c.sources, *c.targets))
        and _uneven_fit(programs, {_what(channel) for program in firsts for channel in program.channels})
    )


def _even(program: Program) -> list[Channel]:
    return [channel for channel in program.channels if channel.kind not in _UNEVEN]


def _shape(program: Program) -> object:
    """A program without workers, registers and uneven channels, with channels numbered as they come."""
    channels = _even(program)
    numbers = {channel.id: n for n, channel in enumerate(channels)}
    lines = []
    for line in program.body:
        takes, gives = (tuple([numbers[c] for c in own if c in numbers]) for own in (line.takes, line.gives))
        lines.append(replace(line, takes=takes, gives=gives))
    kinds = [(_what(channel), channel.phases, channel.within) for channel in channels]
    return program.every, program.over, program.tapes, program.owed, program.holds, kinds, lines


def _what(channel: Channel) -> tuple[object, ...]:
    return channel.kind, channel.slots, channel.sources[0].stage, channel.targets[0].stage


def _uneven_fit(programs: Sequence[Program], of_firsts: set[tuple[object, ...]]) -> bool:
    used: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    uneven = {c.id: c for program in programs for c in program.channels if c.kind in _UNEVEN}
    for program in programs:
        for line in program.body:
            for number in (*line.takes, *line.gives):
                if number in uneven:
                    place = line.offset if uneven[number].sources[0].stage == uneven[number].targets[0].stage else 0
                    used[program.worker, number].append((line.opcode, place))
    return all(
        used[c.sources[0].worker, c.id] == used[c.targets[0].worker, c.id]
        and (c.sources[0].stage == c.targets[0].stage or _what(c) in of_firsts)
        for c in uneven.values()
    )
