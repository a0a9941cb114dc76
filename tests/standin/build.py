"""Compiles the stand-in, once for each version of torch and of its source. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")
LIBRARIES = ("-ltorch_cpu", "-lc10")
DEADLINE_S = 600
COMPILER = "g++"


class CannotStandInError(Exception):
    """Why there can be no stand-in here."""


def torch_folder() -> Path:
    """The folder of torch, found without importing it.

    Raises:
        CannotStandInError: there is no torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotStandInError("no torch is installed here")
    return Path(spec.origin).parent


def cache_folder() -> Path:
    """Where compiled libraries are kept: ``$ROUNDELAY_STANDIN_CACHE``, or a folder of the user's for what may go."""
    named = os.environ.get("ROUNDELAY_STANDIN_CACHE")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"roundelay-standin-{os.getuid()}"


def library() -> Path:
    """The compiled library.

    Raises:
        CannotStandInError: torch has CUDA of its own, or nothing here compiles it.
    """
    folder = torch_folder()
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise CannotStandInError("this torch was built for CUDA; the stand-in needs one for the CPU alone")
    version = importlib.metadata.version("torch")
    mark = hashlib.sha256(SOURCE.read_bytes() + " ".join(OPTIONS).encode()).hexdigest()[:16]
    target = cache_folder() / f"device-{version}-{mark}.so"
    if not target.exists():
        _compile(folder, target)
    return target


def _compile(folder: Path, target: Path) -> None:
    """Compile into a file of this process's own, which then takes its place: others may compile it at the same time."""
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise CannotStandInError(f"no {COMPILER} is here to compile it")
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = target.with_suffix(f".{os.getpid()}")
    paths = (f"-I{folder / 'include'}", f"-L{folder / 'lib'}")
    command = [compiler, *OPTIONS, str(SOURCE), "-o", str(made), *paths, *LIBRARIES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise CannotStandInError(f"{COMPILER} does not compile {target.name}:\n{done.stderr[-4000:]}")
        made.replace(target)
    except subprocess.TimeoutExpired:
        raise CannotStandInError(f"{COMPILER} did not compile it within {DEADLINE_S} s") from None
    finally:
        made.unlink(missing_ok=True)
