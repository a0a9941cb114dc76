"""Makes all checks, or those of some operators, and prints how many came out how, and each that is wrong."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import torch

from tests.op_samples.checks import INTERNAL, SAMPLES, WRONG, checks_of, name_of, operators, outcome, samples_of
from tests.op_samples.simulated import Ranks


def main() -> int:
    """1 if something is wrong, or fails in a way of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default="float64,complex128,int64,bool")
    parser.add_argument("--workers", default="2,3")
    parser.add_argument("--only", default="", help="part of an operator's name")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each operator")
    parser.add_argument("--part", default="0/1", help="which part of all operators, as 0/2")
    parser.add_argument("--show", default=f"{WRONG},{INTERNAL}", help="outcomes that are printed one by one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    number, parts = map(int, given.part.split("/"))
    bad = 0
    for kind in given.dtypes.split(","):
        dtype, counts = getattr(torch, kind), Counter[str]()
        for workers in map(int, given.workers.split(",")):
            with Ranks(workers).active() as ranks:
                for op in list(operators())[number::parts]:
                    if given.only not in name_of(op):
                        continue
                    for at, sample in samples_of(op, dtype, given.samples).items():
                        for check in checks_of(op, at, sample, workers, dtype):
                            how, why = outcome(check, sample, ranks)
                            counts[how] += 1
                            if how in given.show.split(","):
                                print(f"{how}: {check}: {why}", flush=True)
        print(f"{kind}: " + ", ".join(f"{count} {how}" for how, count in sorted(counts.items())), flush=True)
        bad += counts[WRONG] + counts[INTERNAL]
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
