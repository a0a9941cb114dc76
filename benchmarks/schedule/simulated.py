"""What the schedules themselves allow: simulated milliseconds of a batch, and the tapes that they hold for it.

Equal stages of 20 ms for a forward, 20 ms for each half of a backward, and half of that where a worker has two stages;
messages and updates take no time. A batch is the mean of eight in the middle of a run, so neither start nor end counts.
Tapes are counted in micro-batches of a whole worker, second halves that wait included, where most are held.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.common import table
from roundelay.ir.clip import NO_CLIP
from roundelay.ir.loss_scale import NO_SCALE
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import FORMAT, EdgePlan, Plan, StagePlan, WorkerPlan
from roundelay.ir.rule import rule_named
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.schedules import schedule_named
from roundelay.simulator import simulate

PART_S = 0.020
RULES = ("1f1b", "zb-h1", "zb-v", "pipedream")
SIZES = ((2, 4), (4, 8), (4, 16), (8, 16))
SKIPPED, COUNTED = 4, 8
UNIT = 1000


def plan(rule: str, workers: int, micro_batches: int) -> Plan:
    """Equal stages in a chain; a worker's tapes, and its debts, are a thousand bytes."""
    schedule = schedule_named(rule_named(rule).schedule)
    each = schedule.stages_per_worker
    size = each * workers
    stage = StagePlan(
        workers=(),
        segments=("some",),
        forward_s=PART_S / each,
        backward_s=PART_S / each,
        weights_s=PART_S / each,
        update_s=0.0,
        parameter_bytes=0,
        tape_bytes=UNIT // each,
        owed_bytes=UNIT // each,
    )
    edges = (
        EdgePlan(source=k, target=k + 1, slots=size, forward_bytes=0, backward_bytes=0, gradient=True)
        for k in range(size - 1)
    )
    return Plan(
        format=FORMAT,
        model="none",
        rule=rule,
        layout="pipeline",
        predictor="none",
        backward="stash",
        recompute=(),
        compile=False,
        precision="fp32",
        clip=NO_CLIP,
        ema=0.0,
        deterministic=False,
        loss_scale=NO_SCALE,
        replicas=1,
        micro_batches=micro_batches,
        mesh={},
        parameters={},
        outputs={},
        states={},
        sharded=("states",),
        shards=0,
        transport="memory",
        deadline_s=1.0,
        latency_s=0.0,
        bytes_per_s=1.0,
        instruction_s=0.0,
        read_s=0.0,
        input_bytes=0,
        workers=tuple(WorkerPlan(name=f"w{k}", device="cpu", threads=1) for k in range(workers)),
        stages=tuple(replace(stage, workers=(f"w{k}",)) for k in schedule.place(size)),
        edges=tuple(edges),
        exchanges=(),
    )


def batch(rule: str, workers: int, micro_batches: int) -> tuple[float, float]:
    """Milliseconds of a batch, and the tapes of the worker that holds most."""
    made = plan(rule, workers, micro_batches)
    run = simulate(made, emit(read(made)), stream([micro_batches] * (SKIPPED + COUNTED + SKIPPED)))
    first = made.worker_stages[0][0]
    ends = [i.end_s for i in run.intervals if i.opcode == "update" and i.stage == first]
    held = max(report.tape_bytes_peak for report in run.workers) / UNIT
    return 1e3 * (ends[SKIPPED + COUNTED] - ends[SKIPPED]) / COUNTED, held


def main() -> None:
    rows = []
    for workers, micro_batches in SIZES:
        found = [batch(rule, workers, micro_batches) for rule in RULES]
        cells = [f"{ms:.0f} ({held:g})" for ms, held in found]
        rows.append([f"D = {workers}, M = {micro_batches}", f"{3e3 * PART_S * micro_batches:.0f}", *cells])
    print(table(["", "no bubble, ms", *(f"`{rule}`, ms (tapes)" for rule in RULES)], rows))


if __name__ == "__main__":
    main()
