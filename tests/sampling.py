"""The sample of the tests that ``make test`` runs, so that it takes minutes; ``make test-all`` runs them all.

``sample.json`` says how many parameters of a slow test function the sample keeps: of every so many one, or none at all
(0). What it does not name is kept whole, and so is every test that a deliberate break needs
(:data:`tests.options.breaks.BREAKS`).

``python -m tests.sampling LOG`` writes it anew from what ``pytest --durations=0`` has printed.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

SAMPLE = Path(__file__).with_name("sample.json")

CAP_S = 1.5
"""Seconds that the parameters of one function may take together; one of them is kept in any case ..."""

LONG_S = 6.0
"""... unless it alone takes longer than this, on average."""

KEPT = {
    "tests/cli/test_torchrun.py::test_two_launched_processes_compute_what_one_host_alone_does",
    "tests/cli/test_interrupts.py::test_ctrl_c_in_training_ends_everything",
    "tests/resume/test_kill.py::test_a_run_that_restarts_itself_goes_on_in_mid_flight",
    "tests/standin/test_rules_on_standin.py::test_rules_options_layouts_and_checkpoints_hold_on_devices",
    "tests/standin/test_models_on_standin.py::test_models_losses_and_the_tests_for_a_gpu_hold_on_devices",
    "tests/standin/test_launching_on_standin.py::test_a_process_for_each_device_computes_what_threads_do",
}
"""Long ones of which one is kept: what users do first, and nothing else tests."""

_DURATION = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(\S+?)(\[.*)?")


def chosen(node_ids: Sequence[str], sample: Mapping[str, int], needed: Collection[Sequence[str]]) -> list[bool]:
    """For each test whether it is in the sample; ``needed`` are arguments of pytest."""
    met: Counter[str] = Counter()
    keep = []
    for node_id in node_ids:
        function = node_id.partition("[")[0]
        every = sample.get(function, 1)
        keep.append(any(_selects(each, node_id) for each in needed) or (every > 0 and met[function] % every == 0))
        met[function] += 1
    return keep


def _selects(arguments: Sequence[str], node_id: str) -> bool:
    """Whether pytest runs a test for a file, a test, or a file and ``-k`` with words joined by ``and``."""
    place, words = arguments[0], arguments[2].split(" and ") if "-k" in arguments else []
    inside = node_id == place or node_id.startswith((f"{place}::", f"{place}["))
    return inside and all(word in node_id for word in words)


def sample_of(log: str) -> dict[str, int]:
    """From the durations of all tests, which of them are thinned out, and how far."""
    seconds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for match in map(_DURATION.fullmatch, log.splitlines()):
        if match:
            seconds[match[2]][match[3] or ""] += float(match[1])
    sample = {}
    for function, cases in sorted(seconds.items()):
        total = sum(cases.values())
        if total / len(cases) > LONG_S:
            sample[function] = len(cases) if function in KEPT else 0
        elif len(cases) > 1 and total > CAP_S:
            sample[function] = min(len(cases), math.ceil(total / CAP_S))
    return sample


if __name__ == "__main__":
    SAMPLE.write_text(json.dumps(sample_of(Path(sys.argv[1]).read_text(encoding="utf-8")), indent=0) + "\n")
