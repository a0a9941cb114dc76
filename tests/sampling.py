"""The sample of the tests that ``make test`` runs, so that it takes minutes; ``make test-all`` runs them all.

The sample turns: ``sample.json`` says that of a slow test function's parameters one of every so many is run, and each
commit runs others than the commit before it, so that after so many commits every test has been run. What
``sample.json`` does not name is kept whole.

``python -m tests.sampling LOG`` writes it anew from what ``pytest --durations=0`` has printed.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from zlib import crc32

SAMPLE = Path(__file__).with_name("sample.json")

CAP_S = 0.4
"""Seconds that one function may take on an average commit."""

ALWAYS = {
    "tests/op_samples/test_op_samples.py::test_operators_on_parts_give_what_the_plain_ones_give",
    "tests/cli/test_torchrun.py::test_two_launched_processes_compute_what_one_host_alone_does",
    "tests/peers/test_host_join.py::test_three_machines_train_and_the_run_is_proved",
    "tests/cli/test_interrupts.py::test_ctrl_c_in_training_ends_everything",
    "tests/resume/test_kill.py::test_a_run_that_restarts_itself_goes_on_in_mid_flight",
    "tests/standin/test_rules_on_standin.py::test_rules_options_layouts_and_checkpoints_hold_on_devices",
    "tests/standin/test_models_on_standin.py::test_models_losses_and_the_tests_for_a_gpu_hold_on_devices",
    "tests/standin/test_launching_on_standin.py::test_a_process_for_each_device_computes_what_threads_do",
}
"""Functions of which every commit runs at least one test: what users do first, and nothing else tests."""

LONG = "tests/standin/"
"""Where single tests take a minute: a sample begins with them, so that it does not end while one process waits."""

_DURATION = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(\S+?)(\[.*)?")


def turn_of_commit() -> int:
    """How many commits led to the one checked out; 0 where git does not say."""
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        told = subprocess.run(command, cwd=SAMPLE.parent, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(told.stdout)


def chosen(node_ids: Sequence[str], sample: Mapping[str, int], turn: int) -> list[bool]:
    """For each test whether it is in the sample of the commit with this number.

    Functions start their turns apart, so that the long ones do not all meet on one commit.
    """
    met: Counter[str] = Counter()
    keep = []
    for node_id in node_ids:
        function = node_id.partition("[")[0]
        keep.append((met[function] + turn + crc32(function.encode())) % sample.get(function, 1) == 0)
        met[function] += 1
    return keep


def sample_of(log: str) -> dict[str, int]:
    """From the durations of all tests, which of them are thinned out, and how far."""
    seconds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for match in map(_DURATION.fullmatch, log.splitlines()):
        if match:
            seconds[match[2]][match[3] or ""] += float(match[1])
    sample = {}
    for function, cases in sorted(seconds.items()):
        every = math.ceil(sum(cases.values()) / CAP_S)
        if function in ALWAYS:
            every = min(every, len(cases))
        if every > 1:
            sample[function] = every
    return sample


if __name__ == "__main__":
    SAMPLE.write_text(json.dumps(sample_of(Path(sys.argv[1]).read_text(encoding="utf-8")), indent=0) + "\n")
