"""A machine that works for a run of somebody else's allocates no more than it allows."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from roundelay.cli import memory_bound
from roundelay.errors import RunError
memory_bound.ROOM_BYTES = 2**26
before = resource.getrlimit(resource.RLIMIT_DATA)
try:
    with memory_bound.bounded_memory(2**28):
        model = torch.nn.Linear(256, 256)
        model(torch.ones(8, 256)).sum().backward()
        {}
    print("fits")
except RunError as error:
    print(error.got)
except RuntimeError as error:
    print("torch:", error)
assert resource.getrlimit(resource.RLIMIT_DATA) == before
"""


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("pass", "fits"),
        ("bytearray(2**27)", "fits"),
        ("bytearray(2**30)", "more than the 256.0 MiB of --memory-limit"),
        ("torch.ones(2**28)", "allocate memory"),
    ],
)
def test_a_process_has_what_it_allows_and_no_more(does: str, told: str) -> None:
    command = [sys.executable, "-c", CODE.format(does)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert told in done.stdout
