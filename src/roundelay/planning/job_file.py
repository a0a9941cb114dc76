"""A job as it is given: a value, a function of a seed, or a Python file that defines one.

A file is loaded as a module that worker processes of its DataLoader can import, too.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NoReturn, final

from roundelay.errors import JobError, RoundelayError
from roundelay.job import Job
from roundelay.runtime.loading.loader_epoch import seed_everything

_EXAMPLE = "def job(seed: int) -> roundelay.Job"

_WRITE = """A job is a function, in a file of its own:
def job(seed):
    return roundelay.Job(model=..., optimizer=lambda named: ...,
        loss=lambda out, batch: ..., batches=lambda epoch: ...)
help(roundelay.Job) in Python says what each field is."""

_CORRECT = "Correct the file; ROUNDELAY_DEBUG=1 shows the traceback."


GivenJob = Job | Callable[[int], Job] | str | Path
"""A job; a function from a seed to a job; or the path of a file that defines ``def job(seed)``."""


def given_job(given: GivenJob, seed: int) -> Job:
    """The job that is given; one that is made here is made with all random generators seeded, as commands do.

    Raises:
        JobError: the function or the file fails, or makes no job.
    """
    if isinstance(given, Job):
        return given
    if isinstance(given, (str, Path)):
        arguments = list(sys.argv)
        try:
            return load_job(Path(given), seed)
        finally:
            sys.argv = arguments
    if not callable(given):
        raise _no_job(f"a {type(given).__name__}")
    try:
        inspect.signature(given).bind(seed)
    except (TypeError, ValueError) as error:
        raise _no_job("a function that does not take a seed alone") from error
    seed_everything(seed)
    job = given(seed)
    if not isinstance(job, Job):
        raise _no_job(f"a function that returned a {type(job).__name__}")
    return job


def _no_job(got: str) -> JobError:
    expected = "a roundelay.Job, a function from a seed to one, or the path of a file that defines `def job(seed)`"
    return JobError("the job", got=got, expected=expected, remedy=_WRITE)


def load_job(path: Path, seed: int) -> Job:
    """Load the job that ``path`` defines, with all random generators seeded.

    Raises:
        JobError: the file is missing, cannot be read or run, or defines no job.
    """
    return job_maker(path)(seed)


def job_maker(path: Path) -> Callable[[int], Job]:
    """Run a job file once; returns a function from a seed to a job.

    Raises:
        JobError: the file is missing, cannot be read or run, or defines no job; the returned function raises it, too.
    """
    module = _module(path)
    make = getattr(module, "job", None)
    if not callable(make):
        names = [name for name in vars(module) if not name.startswith("_")][:8]
        raise _unusable(path, f"no function called job (it defines {', '.join(names) or 'nothing'})")

    def job_of(seed: int) -> Job:
        seed_everything(seed)
        try:
            job = make(seed)
        except RoundelayError:
            raise
        except (Exception, SystemExit) as error:  # user code
            raise _failed(path, error) from error
        if not isinstance(job, Job):
            raise _unusable(path, f"job({seed}) returned a {type(job).__name__}")
        return job

    return job_of


@final
class _Script(SourceFileLoader):
    """Reads a file as Python reads a script, without cached bytecode: that may be stale after an edit in one second."""

    def path_stats(self, path: str) -> NoReturn:
        """Raise an error, so that no bytecode is read or written."""
        raise OSError("a script has no bytecode")


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise _unusable(path, "a folder" if path.is_dir() else "no such file")
    if path.suffix != ".py":
        raise _unusable(path, "a file that is no Python file")
    sys.path.insert(0, str(path.resolve().parent))
    sys.argv = [str(path)]  # permanently: a job may read it later, also in processes of its own that import it
    name = _name(path)
    spec = importlib.util.spec_from_file_location(name, path, loader=_Script(name, str(path)))
    if spec is None or spec.loader is None:
        raise _unusable(path, "a file that cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except RoundelayError:
        raise
    except (Exception, SystemExit) as error:  # user code
        raise _failed(path, error) from error
    return module


def _name(path: Path) -> str:
    """The name of the file's module: one that `import` finds, if possible.

    Objects that a DataLoader sends to spawned processes are found by this name, as the folder is in `sys.path`.
    """
    known = sys.modules.get(path.stem)
    if "." not in path.stem and (known is None or isinstance(known.__spec__ and known.__spec__.loader, _Script)):
        sys.modules.pop(path.stem, None)
        importlib.invalidate_caches()
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(path.stem)
            if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path.resolve():
                return path.stem
    return f"roundelay_job_{path.stem}"


def _describe(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"line {error.lineno}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    line = f"line {frames[-1].lineno}: " if frames else ""
    return f"{line}{type(error).__name__}: {error}"


def _failed(path: Path, error: BaseException) -> JobError:
    if isinstance(error, SystemExit):
        return _unusable(
            path,
            _describe(path, error),
            "A job file gets no arguments: its sys.argv has only its path. Give every argument of a parser a default, "
            "or use environment variables.",
        )
    return _unusable(path, _describe(path, error), _CORRECT)


def _unusable(path: Path, got: str, remedy: str = _WRITE) -> JobError:
    return JobError(
        f"job file {path}",
        got=got,
        expected=f"a Python file that defines `{_EXAMPLE}`",
        remedy=remedy,
    )
