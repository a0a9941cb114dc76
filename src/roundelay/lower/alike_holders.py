"""Holders of a stage that run alike, so that a few of them stand for all.

In a pipeline the holders of a stage, its replicas and the workers of its mesh, run the same program on channels of
their own. They differ in this alone: the holder 0 of stage 0 reads, and sends the others of the stage their data; and
norms of gradients go to it and come from it. What the machines of a plan do depends on programs and messages, never on
timing (Kahn, *The semantics of a simple language for parallel programming*, 1974): if one order of events ends without
a deadlock, every order does, and in each a worker runs the same instructions and reads the same versions. That allows
two reductions.

**One of each stage** has the order of all (:func:`one_of_each`). All can go in step, line by line: each finds the
messages of its neighbours as the first holder finds its own, an exchange is complete when its line is over, and what
goes from holder to holder of a stage is given and taken in one line.

**Two of each stage**, the first and another, have the times of all, where no norm travels: the others get their data at
the same time, later than the first, and each exchange, in which one of the others always takes part, waits for these.
It is checked in each exchange that the first was not the later one (:mod:`roundelay.simulator.makespan`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from roundelay.ir.plan import Plan
from roundelay.ir.program import SCALARS, Channel, Instruction, Port, Program
from roundelay.lower.reading import Reading

_UNEVEN = ("data", *SCALARS)
"""Channels of which holders of a stage have not the same."""


def first_holders(plan: Plan) -> Plan:
    """The plan with the first holder of each stage alone, which exchanges with nobody."""
    stages = tuple([replace(stage, workers=stage.workers[:1]) for stage in plan.stages])
    kept = {name for stage in stages for name in stage.workers}
    workers = tuple([worker for worker in plan.workers if worker.name in kept])
    return replace(plan, replicas=1, mesh={}, shards=0, workers=workers, stages=stages)


def one_of_each(reading: Reading, programs: Sequence[Program]) -> tuple[Program, ...] | None:
    """The programs of the first holders, as those of the workers of :func:`first_holders`.

    Args:
        reading: of the plan.
        programs: of all workers.

    Returns:
        None if not all holders run alike: their programs must be the same but for workers, registers and the numbers
        of channels, all ends must know a channel alike, and a channel that not all holders have must be given and taken
        in the same lines, and if it joins two stages, join their first holders too.
    """
    plan = reading.plan
    firsts = {worker: plan.holders(k)[0] for k in range(plan.num_stages) for worker in plan.holders(k)}
    if reading.form is not None or len(firsts) < len(programs) or not _are_joined(programs, set(firsts.values())):
        return None
    numbers = {worker: number for number, worker in enumerate(sorted(set(firsts.values())))}
    to = {worker: numbers[first] for worker, first in firsts.items()}
    first_of = {program.worker: program for program in programs if program.worker in numbers}
    called: dict[int, int] = {}
    for program in programs:
        first = first_of[firsts[program.worker]]
        names = dict(zip_longest(_even(program), own := _even(first), fillvalue=-1))
        if any(called.setdefault(number, name) != name for number, name in names.items()):
            return None
        if _renamed(program, names, to, 0) != _renamed(first, dict(zip(own, own, strict=True)), to, 0):
            return None
    return tuple(
        [_renamed(first, _between_firsts(first, numbers), to, first.registers) for first in first_of.values()]
    )


def _even(program: Program) -> list[int]:
    """The channels of which each holder has one like it."""
    return [channel.id for channel in program.channels if channel.kind not in _UNEVEN]


def _between_firsts(first: Program, numbers: Container[int]) -> dict[int, int]:
    """All channels of a first holder but those to others of its stage."""
    return {
        channel.id: channel.id
        for channel in first.channels
        if channel.kind not in _UNEVEN
        or (_stages(channel) > 1 and all(port.worker in numbers for port in _ports(channel)))
    }


def _renamed(program: Program, names: Mapping[int, int], to: Mapping[int, int], registers: int) -> Program:
    """A program with other numbers of channels and workers.

    Args:
        program: of a holder.
        names: new numbers of channels; others are left out.
        to: new numbers of workers; ports that become the same are one.
        registers: instead of its own.
    """

    def ports(own: Sequence[Port]) -> tuple[Port, ...]:
        return tuple(dict.fromkeys([Port(to[port.worker], port.stage) for port in own]))

    def line(own: Instruction) -> Instruction:
        if not own.takes and not own.gives:
            return own
        takes, gives = ([names[c] for c in channels if c in names] for channels in (own.takes, own.gives))
        return replace(own, takes=tuple(takes), gives=tuple(gives))

    return replace(
        program,
        worker=to[program.worker],
        registers=registers,
        channels=tuple(
            [
                replace(c, id=names[c.id], sources=ports(c.sources), targets=ports(c.targets))
                for c in program.channels
                if c.id in names
            ]
        ),
        body=tuple([line(own) for own in program.body]),
    )


def _are_joined(programs: Sequence[Program], firsts: Container[int]) -> bool:
    """Whether all ends of each channel know it alike, and those that not all holders have fit the first ones'."""
    known = {(program.worker, channel.id): channel for program in programs for channel in program.channels}
    used: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for program in programs:
        for line in program.body:
            for number in (*line.takes, *line.gives):
                used[program.worker, number].append((line.opcode, line.offset))
    uneven = [channel for channel in known.values() if channel.kind in _UNEVEN]
    of_firsts = {_what(channel) for channel in uneven if all(port.worker in firsts for port in _ports(channel))}
    return (
        all(known.get((port.worker, n)) == channel for (_, n), channel in known.items() for port in _ports(channel))
        and all(worker in [port.worker for port in _ports(channel)] for (worker, _), channel in known.items())
        and all(_what(channel) in of_firsts for channel in uneven if _stages(channel) > 1)
        and all(
            _where(used[channel.sources[0].worker, channel.id], channel)
            == _where(used[port.worker, channel.id], channel)
            for channel in uneven
            for port in channel.targets
        )
    )


def _ports(channel: Channel) -> tuple[Port, ...]:
    return (*channel.sources, *channel.targets)


def _stages(channel: Channel) -> int:
    """How many stages a channel joins."""
    return len({port.stage for port in _ports(channel)})


def _what(channel: Channel) -> tuple[object, ...]:
    return channel.kind, channel.slots, channel.sources[0].stage, channel.targets[0].stage


def _where(lines: Sequence[tuple[str, int]], channel: Channel) -> list[tuple[str, int]]:
    """The lines that use a channel: their opcodes, and their offsets within a stage."""
    within = _stages(channel) == 1
    return [(opcode, offset if within else 0) for opcode, offset in lines]
