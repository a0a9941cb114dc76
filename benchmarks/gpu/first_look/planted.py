"""``python -m benchmarks.gpu.first_look.planted FAULT MODULE ...``: a module's program, with a fault on purpose."""

from __future__ import annotations

import runpy
import sys

from benchmarks.gpu.first_look import plants


def main() -> None:
    _, fault, module, *words = sys.argv
    plants.plant(fault)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
