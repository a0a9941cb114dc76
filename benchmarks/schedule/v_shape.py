"""What a V of virtual stages would gain: a simulation of orders alone, for a schedule that Roundelay does not run.

D workers with two virtual stages each, worker k with k and 2D-1-k, so that forwards turn at the last worker and come
back; a forward, a first half and a second half of a virtual stage take half of what they take of a stage. Nothing of
the product is asked: a worker that is free takes what is ready, first halves before forwards before second halves,
later forwards of a V before earlier ones, and holds no more than 2D tapes of half a stage, which is what stage 0 of
`1f1b` holds. Messages take no time. Every worker updates by itself, so batches follow each other without a barrier.
"""

from __future__ import annotations

import heapq

from benchmarks.common import table

Op = tuple[str, int, int]
"""Kind (F, B, W), virtual stage, micro-batch."""


def needs(op: Op, count: int) -> list[Op]:
    """What must have ended before, for ``count`` virtual stages."""
    kind, stage, g = op
    if kind == "F" and stage:
        return [("F", stage - 1, g)]
    if kind == "F":
        return []
    before: list[Op] = [("B", stage, g)] if kind == "W" else [("F", stage, g)]
    return before if kind == "W" or stage == count - 1 else [*before, ("B", stage + 1, g)]


def makespan(workers: int, per_batch: int, batches: int, seconds: dict[str, float]) -> float:
    """Seconds of some batches."""
    count, total = 2 * workers, per_batch * batches
    todo: list[set[Op]] = [set() for _ in range(workers)]
    for stage in range(count):
        owner = min(stage, count - 1 - stage)
        todo[owner] |= {(kind, stage, g) for kind in "FBW" for g in range(total)}
    ended: set[Op] = set()
    held, busy = [0] * workers, [False] * workers
    settled = [0] * workers  # second halves done
    heap: list[tuple[float, int, Op]] = []
    now = 0.0

    def ready(worker: int) -> list[tuple[int, int, int, Op]]:
        found = []
        oldest = settled[worker] // (2 * per_batch)  # the batch whose update has not been made
        for op in todo[worker]:
            kind, stage, g = op
            if any(need not in ended for need in needs(op, count)):
                continue
            if kind == "F" and (g // per_batch > oldest or held[worker] >= 2 * workers):
                continue
            found.append(("BFW".index(kind), g, -stage, op))
        return found

    while True:
        for worker in range(workers):
            if not busy[worker] and (found := ready(worker)):
                op = min(found)[-1]
                todo[worker].discard(op)
                busy[worker] = True
                held[worker] += op[0] == "F"
                heapq.heappush(heap, (now + seconds[op[0]], worker, op))
        if not heap:
            return now
        now = heap[0][0]
        while heap and heap[0][0] == now:
            _, worker, op = heapq.heappop(heap)
            ended.add(op)
            busy[worker] = False
            held[worker] -= op[0] == "W"
            settled[worker] += op[0] == "W"


def main() -> None:
    rows = []
    for workers, per_batch in ((2, 4), (4, 8), (4, 16), (8, 16)):
        half = dict.fromkeys("FBW", 10.0)
        one, two, three = (makespan(workers, per_batch, n, half) for n in (1, 2, 3))
        work = per_batch * 60.0
        h1, plain = work + (workers - 1) * 20.0, work + (workers - 1) * 60.0
        cells = [work, plain, h1, three - two, one]
        rows.append([f"D = {workers}, M = {per_batch}", *(f"{cell:.0f}" for cell in cells)])
    columns = [
        "20, 20 and 20 ms a stage",
        "no bubble, ms a batch",
        "1f1b",
        "zb-h1",
        "a V, the third batch",
        "a V, alone",
    ]
    print(table(columns, rows))


if __name__ == "__main__":
    main()
