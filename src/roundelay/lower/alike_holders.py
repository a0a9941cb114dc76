"""Holders of a stage that run alike, so that a few of them stand for all.

In a pipeline the holders of a stage, its replicas and the workers of its mesh, run the same program on channels of
their own. They differ only in that the holder 0 of stage 0 reads the data and sends the others theirs, and in who sends
a norm to it. So a plan of fewer holders (:func:`with_holders`) has the programs of these, with every exchange among all
of them.

**One of each stage** does what each does, in the same order: all can go in step, line by line. Each finds the messages
of its neighbours then as the first finds those of its own, an exchange is complete when its line is over, and what goes
from holder to holder of a stage is sent and taken in one line. What machines do depends on their programs and messages,
never on timing (Kahn, *The semantics of a simple language for parallel programming*, 1974): if one order of events ends
without a deadlock, all do, and with the same versions.

**Two of each stage**, the first and another, have the times of all where no norm travels: the others get their data at
the same time, later than the first, so that each exchange, in which one of the others always takes part, waits for
these. Who runs them checks in each exchange that the first was not the later one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from roundelay.ir.mesh import REPLICAS
from roundelay.ir.plan import Plan
from roundelay.ir.program import SCALARS, Channel, Instruction, Port, Program
from roundelay.lower.reading import Reading

_UNEVEN = ("data", *SCALARS)
"""Channels of which holders of a stage have not the same."""


def with_holders(plan: Plan, count: int) -> Plan:
    """The plan with the first holders of each stage alone, which exchange all among each other.

    Args:
        plan: a pipeline.
        count: how many; not more than there are.
    """
    on_mesh = plan.mesh_size > 1
    axis = next(iter(plan.mesh)) if on_mesh else REPLICAS
    stages = tuple([replace(stage, workers=stage.workers[:count]) for stage in plan.stages])
    kept = {name for stage in stages for name in stage.workers}
    return replace(
        plan,
        replicas=1 if on_mesh else count,
        mesh={axis: count} if on_mesh else {},
        shards=0,
        workers=tuple([worker for worker in plan.workers if worker.name in kept]),
        stages=stages,
        exchanges=tuple([e if e.axis == axis else replace(e, axis=axis) for e in plan.exchanges]),
    )


def one_of_each(reading: Reading, programs: Sequence[Program]) -> tuple[Program, ...] | None:
    """The programs of the first holders, as those of the workers of :func:`with_holders`.

    Args:
        reading: of the plan.
        programs: of all workers.

    Returns:
        None where a program differs in more than channels and workers from that of the first holder of its stages, or
        where the two ends of a channel do not have it in the same lines.
    """
    plan = reading.plan
    if reading.form is not None:
        return None
    firsts = {worker: plan.holders(k)[0] for k in range(plan.num_stages) for worker in plan.holders(k)}
    numbers = {worker: number for number, worker in enumerate(sorted(set(firsts.values())))}
    to = {worker: numbers[first] for worker, first in firsts.items()}
    first_of = {program.worker: program for program in programs if program.worker in numbers}
    if len(to) < len(programs) or not _joined(programs):
        return None
    for program in programs:
        first = first_of[firsts[program.worker]]
        if len(_even(first)) != len(_even(program)) or _renamed(program, first, to) != _renamed(first, first, to):
            return None
    return tuple([_renamed(program, program, to, numbers) for program in first_of.values()])


def _even(program: Program) -> list[Channel]:
    return [channel for channel in program.channels if channel.kind not in _UNEVEN]


def _renamed(program: Program, first: Program, to: Mapping[int, int], numbers: Mapping[int, int] | None = None) -> Program:
    """A program with workers and channels called as those of the first holder.

    Args:
        program: of a holder.
        first: of the first holder of its stages.
        to: by worker the number of the first holder.
        numbers: the same of the first holders, to keep what these alone send each other; else it is left out.
    """
    names = {own.id: other.id for own, other in zip(_even(program), _even(first), strict=True)}
    for channel in program.channels if numbers else ():
        ends = {port.worker for port in (*channel.sources, *channel.targets)}
        if channel.kind in _UNEVEN and ends <= numbers.keys() and len(ends) > 1:
            names[channel.id] = channel.id

    def ports(own: Sequence[Port]) -> tuple[Port, ...]:
        return tuple(dict.fromkeys([Port(to[port.worker], port.stage) for port in own]))

    channels = [
        replace(channel, id=names[channel.id], sources=ports(channel.sources), targets=ports(channel.targets))
        for channel in program.channels
        if channel.id in names
    ]
    return replace(
        program,
        worker=to[program.worker],
        registers=program.registers if numbers else 0,
        channels=tuple(channels),
        body=tuple([_line(line, names) for line in program.body]),
    )


def _line(line: Instruction, names: Mapping[int, int]) -> Instruction:
    if not line.takes and not line.gives:
        return line
    takes, gives = ([names[channel] for channel in own if channel in names] for own in (line.takes, line.gives))
    return replace(line, takes=tuple(takes), gives=tuple(gives))


def _joined(programs: Sequence[Program]) -> bool:
    """Whether the ends of each channel know it alike, and those that holders do not have alike in the same lines."""
    known: dict[tuple[int, int], Channel] = {(p.worker, c.id): c for p in programs for c in p.channels}
    lines: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for program in programs:
        for line in program.body:
            for channel in (*line.takes, *line.gives):
                lines[program.worker, channel].append((line.opcode, line.offset))
    for (worker, number), channel in known.items():
        ports, source = (*channel.sources, *channel.targets), channel.sources[0].worker
        if any(known.get((port.worker, number)) != channel for port in ports):
            return False
        if channel.kind in _UNEVEN and _where(lines[worker, number], ports) != _where(lines[source, number], ports):
            return False
    return True


def _where(lines: Sequence[tuple[str, int]], ports: Sequence[Port]) -> list[tuple[str, int]]:
    """Lines by opcode, and by offset as well if the ports of their channel are of one stage."""
    alike = len({port.stage for port in ports}) == 1
    return [(opcode, offset * alike) for opcode, offset in lines]
