"""Run folders: the files of one run, by default in ``runs``, with a link named latest to the newest."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from roundelay.checkpoint.atomic_files import replacing_file, strict_json
from roundelay.errors import UsageError
from roundelay.observe.metrics_file import MetricsWriter

LATEST = "latest"

_NAME = re.compile(r"\w[\w.+=, -]*")
_PROBE = ".probe"
REFUSED = "refused.jsonl"
"""Name of the file of what was refused while a run was hosted."""


_NOT_A_RUN = (
    "Name a folder that `roundelay train` has written; a comparison has curves.html, and its runs are in runs/."
)


@final
@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder, made by :meth:`create` or :meth:`reopen`.

    Args:
        path: the folder.
        created: folders created for it, the innermost first, which :meth:`discard` may remove.
        previous: the previous target of the link ``latest``, if any.
    """

    path: Path
    created: tuple[Path, ...]
    previous: str | None

    @staticmethod
    def create(root: Path, name: str | None = None, *, point: bool = True) -> RunFolder:
        """Create ``root/name``, check that it can be written, and link ``root/latest`` to it.

        Args:
            root: the folder of all runs; created if absent.
            name: the run's name; by default the local time and a short suffix. An empty folder may exist already.
            point: whether to set the link ``latest``.

        Raises:
            UsageError: the name is not valid or is taken, or the folder cannot be written.
        """
        if name is not None and (name == LATEST or not _NAME.fullmatch(name)):
            raise _refused(f"run name {name!r}", "a name that is not valid", "letters, digits and any of _ . + = , -")
        path = root / (name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
        created = tuple(folder for folder in (path, *path.parents) if not folder.exists())
        try:
            path.mkdir(parents=True, exist_ok=name is not None)
            check_vacant(path)
            _probe(path)
            return RunFolder(path, created, _point_latest(path) if point else None)
        except OSError as error:
            _remove(created)
            remedy = "Correct the permissions, free some space, or put the runs elsewhere."
            raise _refused(f"run folder {path}", str(error.strerror), "a folder to write in", remedy) from error

    @staticmethod
    def reopen(path: Path) -> RunFolder:
        """The folder of an existing run.

        Raises:
            UsageError: there is none at ``path``.
        """
        folder = RunFolder(path, (), None)
        if not folder.plan.is_file():
            raise _refused(f"run folder {path}", "no plan.toml in it", "the folder of a run", _NOT_A_RUN)
        return folder

    @property
    def plan(self) -> Path:
        """The plan that was run."""
        return self.path / "plan.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object per update."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON object per evaluation, if there was one."""
        return self.path / "evaluations.jsonl"

    @property
    def summary(self) -> Path:
        """A summary as JSON, written at the run's end."""
        return self.path / "summary.json"

    @property
    def trace(self) -> Path:
        """The run's instructions over time, for Perfetto."""
        return self.path / "trace.json"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's curves, if they were wanted."""
        return self.path / "tensorboard"

    @property
    def checkpoint(self) -> Path:
        """The folder of the last checkpoint."""
        return self.path / "checkpoint"

    def write_plan(self, text: str) -> None:
        """Write the plan's text.

        Raises:
            RunError: it cannot be written.
        """
        with replacing_file(self.plan) as file:
            file.write(text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary as JSON, atomically. A float that is not finite becomes ``null``.

        Raises:
            RunError: it cannot be written.
        """
        text = strict_json(summary, indent=2)
        with replacing_file(self.summary) as file:
            file.write(text + "\n")

    def open_metrics(self) -> MetricsWriter:
        """The metrics file, open for more lines.

        Raises:
            RunError: it cannot be written.
        """
        return MetricsWriter(self.metrics)

    def add_evaluation(self, update: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics that the job's ``evaluate`` returned after an update.

        Raises:
            RunError: it cannot be written.
        """
        with MetricsWriter(self.evaluations) as file:
            file.write(update=update, epoch=epoch, time=round(time.time(), 3), metrics=dict(metrics))

    def cut_evaluations(self, updates: int) -> None:
        """Remove the evaluations after update number ``updates`` and later ones: they will be repeated.

        Raises:
            RunError: the file cannot be read or written.
        """
        if self.evaluations.exists():
            with MetricsWriter(self.evaluations) as file:
                file.cut(updates)

    def discard(self) -> None:
        """Undo :meth:`create` if all files in the folder are empty."""
        entries = list(self.path.iterdir()) if self.path.is_dir() else []
        if any(not entry.is_file() or entry.stat().st_size for entry in entries):
            return
        for entry in entries:
            entry.unlink()
        latest = self.path.parent / LATEST
        with suppress(OSError):
            if latest.is_symlink() and latest.readlink() == Path(self.path.name):
                _link(latest, self.previous)
        _remove(self.created)


def _probe(path: Path) -> None:
    """Write a small file: permissions alone do not show that a disk is full or mounted read-only."""
    probe = path / _PROBE
    try:
        probe.write_bytes(bytes(4096))
    finally:
        probe.unlink(missing_ok=True)


def _point_latest(path: Path) -> str | None:
    """Link ``latest`` to ``path``, if the file system has links; returns its previous target."""
    latest = path.parent / LATEST
    if latest.exists() and not latest.is_symlink():
        raise FileExistsError(None, f"{latest} is not a link")
    previous = os.readlink(latest) if latest.is_symlink() else None
    with suppress(OSError):
        _link(latest, path.name)
    return previous


def _link(latest: Path, target: str | None) -> None:
    """Atomically make ``latest`` a relative link to ``target``, or remove it."""
    if target is None:
        latest.unlink(missing_ok=True)
        return
    link = latest.with_name(f".{LATEST}.{secrets.token_hex(4)}")
    link.symlink_to(target, target_is_directory=True)
    link.replace(latest)


def _remove(folders: tuple[Path, ...]) -> None:
    """Remove folders, the innermost first, as long as they are empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def check_vacant(path: Path) -> None:
    """Refuse a folder for a new run that is not empty; what a host that nobody joined has refused may be in it.

    Raises:
        UsageError: it is not.
    """
    if path.is_dir() and any(entry.name != REFUSED for entry in path.iterdir()):
        raise _refused(f"run folder {path}", "a folder that is not empty", "a new folder, or an empty one")


def _refused(subject: str, got: str, expected: str, remedy: str = "Choose another name.") -> UsageError:
    return UsageError(subject, got=got, expected=expected, remedy=remedy)
