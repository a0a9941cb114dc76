"""Every case on the stand-in, a line for each: ``python -m tests.standin.table``, minutes. Ends with 1 if one fails.

A run must equal its reference, and its streams must wait for each other.

Words on the command line choose those cases whose line holds them all; ``--trace`` shows what raises.
"""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from importlib import import_module

import_module("tests.standin.device")  # before torch

import torch  # noqa: E402

from tests.standin.matrix import Case, layouts, models, pairs, races_of, run  # noqa: E402
from tests.standin.own_models import OWN  # noqa: E402
from tests.zoo import MODELS  # noqa: E402


def outcome(case: Case, *, trace: bool) -> str:
    """What is wrong with a case; empty if nothing is."""
    try:
        return run(case) or "; ".join(races_of(case)[:3])
    except Exception as error:  # the others go on
        if trace:
            traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def main(arguments: list[str]) -> int:
    """Print the table; the exit code."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    words, trace = [word for word in arguments if word != "--trace"], "--trace" in arguments
    cases = [case for case in (*pairs(), *layouts(), *models((*MODELS, *OWN))) if all(w in str(case) for w in words)]
    wrong, began = 0, time.perf_counter()
    for case in cases:
        at = time.perf_counter()
        what = outcome(case, trace=trace)
        wrong += bool(what)
        sys.stdout.write(f"{'WRONG' if what else 'equal'}  {time.perf_counter() - at:5.2f} s  {case}\n")
        sys.stdout.write(f"       {what}\n" if what else "")
        sys.stdout.flush()
    sys.stdout.write(f"{len(cases)} cases, {wrong} wrong, {time.perf_counter() - began:.0f} s\n")
    return 1 if wrong or not cases else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
