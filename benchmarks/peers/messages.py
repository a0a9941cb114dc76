"""Does our grpc keep up with plain gloo? The same plan over both, on lines of 100 Mbit/s and 40 ms.

Three stages that sleep 20 ms for a micro-batch exchange messages of 64 KiB, and of 1 MiB. Compared are updates per
second over our grpc, which checks every piece and encrypts, and over torch's bare ``ProcessGroupGloo`` with receives
posted ahead, in alternating rounds; our own gloo beside, in one. The limit is what the stages compute, or the line of
the middle stage carries: in each direction a message forward and one back.

Every round begins with half a minute that does not count. A packet that is lost while connections open leaves TCP with
a small window, and reno, the one control of congestion that some kernels allow in a namespace, then takes that long to
fill a line of 40 ms.

    .venv/bin/python -m benchmarks.peers.messages [--repeats 5] [--short] [--anyway] [--out FILE]
"""

from __future__ import annotations

import statistics
import sys
from functools import partial

import roundelay
from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.peers import sleeping
from benchmarks.peers.forked import over_grpc, over_our_gloo
from benchmarks.peers.plain_gloo import over_plain_gloo
from tests.wan.bed import Bed, Unusable

SIZES = {"64 KiB": 2**16, "1 MiB": 2**20}
WARM_S, WANTED = 30, 0.9


def main() -> None:
    """Run, and print a table."""
    what = asked(__doc__ or "")
    found: dict[str, dict[str, list[float]]] = {}
    rows = []
    with Bed(peers=sleeping.STAGES, mbit_per_s=sleeping.MBIT_PER_S, rtt_ms=sleeping.RTT_MS) as bed:
        for name, size in SIZES.items():
            job = sleeping.job_of(size)
            captured = roundelay.capture(job)
            plan = sleeping.plan_of(job, captured, "grpc")
            limit = min(sleeping.COMPUTE_LIMIT, sleeping.BYTES_PER_S / (2 * size))
            measured = partial(sleeping.updates_per_s, job, captured, plan)
            updates = round((3 if what.short else 6) * min(limit, 25))
            warm = round(WARM_S * min(limit, 25))
            ways = {"plain gloo": over_plain_gloo(bed, size), "our grpc": over_grpc(bed)}
            runs = {way: partial(measured, connecting, warm, updates) for way, connecting in ways.items()}
            rates = found[name] = alternate(runs, what.repeats)
            beside = measured(over_our_gloo(bed), 12, updates // 2)
            medians = {way: statistics.median(each) for way, each in rates.items()}
            cells = [f"{medians['our grpc'] / medians['plain gloo']:.2f}", f"{medians['our grpc'] / limit:.2f}"]
            rows.append([name, f"{limit:.1f}", *map(spread, rates.values()), *cells, f"{beside:.1f}"])
    head = ["message", "limit", *found["1 MiB"], "our grpc / plain gloo", "our grpc / limit", "our gloo, one round"]
    text = f"Updates per second:\n\n{table(head, rows)}\n\nWanted of plain gloo's: {WANTED}."
    report(what, text, {"updates per s": found})


if __name__ == "__main__":
    try:
        main()
    except Unusable as error:
        sys.exit(str(error))
