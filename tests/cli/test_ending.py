"""A command that is over ends at once: no last search for garbage, which takes seconds where torch has traced."""

import subprocess
import sys

ENDS = """
import atexit, gc, sys
from roundelay.cli import app
atexit.register(lambda: print("frozen", gc.get_freeze_count(), "left", len(gc.get_objects())))
sys.argv = ["roundelay", "--help"]
app.main()
"""


def test_nothing_is_left_to_collect_when_a_command_ends() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    frozen, left = map(int, done.stdout.split()[-3::2])
    assert frozen > 10_000
    assert left < 10_000
