"""The checks, the most valuable first."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.gpu.first_look.place import Place

PARTS = 3
"""Processes for the programs of strangers."""


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        name: of its row.
        where: module and function, loaded in the check's own process.
        limit_s: seconds that it may take.
        alone: measures speed or memory, so that nothing else may run beside it.
        given: further arguments of the function.
    """

    name: str
    where: str
    limit_s: float
    alone: bool = False
    given: dict[str, Any] = field(default_factory=dict)

    def function(self) -> Callable[[Place], None]:
        """The check itself."""
        module, _, name = self.where.partition(".")
        loaded = importlib.import_module(f"benchmarks.gpu.first_look.{module}")
        return partial(getattr(loaded, name), **self.given)


CHECKS = (
    Check("versions", "commands.versions", 60),
    Check("tests/gpu", "commands.gpu_tests", 210),
    Check("one worker = plain", "equal.one_worker", 120),
    Check("verify rules", "equal.rules", 150),
    Check("verify nets", "equal.nets", 180),
    Check("verify options", "equal.options", 180),
    Check("verify zoo", "equal.zoo", 240),
    *(
        Check(f"programs {part + 1} of {PARTS}", "equal.programs", 180, given={"part": part, "of_parts": PARTS})
        for part in range(PARTS)
    ),
    Check("twice", "equal.twice", 90),
    Check("out of memory", "commands.out_of_memory", 100),
    Check("wrong label", "commands.wrong_label", 100),
    Check("ctrl-c", "commands.ctrl_c", 110),
    Check("launching", "commands.launching", 240),
    Check("host reads", "watch.host_reads", 100),
    Check("memory over runs", "watch.memory_over_runs", 110),
    Check("gpt2 small", "measure.gpt_small", 150, alone=True),
    Check("linear layers", "measure.wide", 100, alone=True),
    Check("layout single", "measure.layout_single", 180, alone=True),
    Check("overlap", "watch.overlap", 100, alone=True),
    Check("checkpoint stall", "measure.checkpoint_stall", 100, alone=True),
    Check("gpt2 124M", "measure.gpt_full", 300, alone=True),
    Check("gpt2 compiled", "measure.gpt_compiled", 200, alone=True),
)
BY_NAME = {check.name: check for check in CHECKS}
