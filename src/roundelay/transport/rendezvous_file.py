"""A file by which processes of one host find each other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def rendezvous_file() -> Generator[str, None, None]:
    """Path of an empty file for the rendezvous, in memory if possible, so that nothing can be left over."""
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        descriptor = os.memfd_create("roundelay")
        try:
            yield f"/proc/self/fd/{descriptor}"  # the forked workers have it too
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="roundelay-", ignore_cleanup_errors=True) as folder:
            yield str(Path(folder) / "store")
