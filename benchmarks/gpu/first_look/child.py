"""``python -m benchmarks.gpu.first_look.child NAME KIND tiny|full [FAULT]``: one check, in this process."""

from __future__ import annotations

import sys

import torch

from benchmarks.gpu.first_look import plants, told
from benchmarks.gpu.first_look.checks import BY_NAME
from benchmarks.gpu.first_look.place import Place


def check(name: str, place: Place, fault: str = "") -> int:
    """Run a check; returns the exit code."""
    try:
        if not place.cuda:
            torch.set_num_threads(1)
        elif not torch.cuda.is_available():
            told.fails("torch sees no CUDA device")
            return 1
        plants.plant(fault)
        BY_NAME[name].function()(place)
    except BaseException as error:
        told.fails(told.in_words(error))
        return 1
    return 0


def main() -> None:
    name, kind, size, *fault = sys.argv[1:]
    sys.exit(check(name, Place(kind, size == "tiny"), *fault))


if __name__ == "__main__":
    main()
