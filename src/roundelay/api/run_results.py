"""One run of a comparison as it is kept: a JSON file each, so that what is finished is never done again.

``comparison.json`` beside them says what all runs of the folder have in common; another comparison is refused there.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundelay.api.comparison_variants import Variant
from roundelay.checkpoint.atomic_files import replacing_file, strict_json, unwritten
from roundelay.errors import UsageError

FORMAT = 1
LOSS = "loss"
"""Name of the training loss; an evaluated metric of this name becomes ``evaluate.loss``."""

TRAINING = "train."
"""Prefix of a metric that the loss function returns in addition to the loss; evaluated metrics have no prefix."""


def is_per_update(name: str) -> bool:
    """Whether a metric has a value for every update, as the loss has, and not for every evaluation."""
    return name == LOSS or name.startswith(TRAINING)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a curve.

    Args:
        updates: number of updates until then; for a loss, including the update of its own batch.
        seconds: since the start of the run; nan if unknown.
        value: of the loss or metric; nan if it is not finite.
    """

    updates: int
    seconds: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Curves and speed of one finished run.

    Args:
        variant: the variant's name.
        seed: of the run.
        curves: name of the loss or a metric to its points, in order of updates.
        samples_per_second: over the whole run but its first tenth; nan if the run diverged.
        diverged: the update whose loss was not finite, or None.
    """

    variant: str
    seed: int
    curves: Mapping[str, tuple[Point, ...]]
    samples_per_second: float
    diverged: int | None

    def text(self) -> str:
        """As JSON."""
        curves = {name: [[p.updates, p.seconds, p.value] for p in points] for name, points in self.curves.items()}
        fields = {"variant": self.variant, "seed": self.seed, "diverged": self.diverged, "curves": curves}
        return strict_json({"format": FORMAT, **fields, "samples_per_second": self.samples_per_second}) + "\n"

    @staticmethod
    def parse(text: str) -> RunResult:
        """What :meth:`text` has written.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is something else.
        """
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        curves = {
            name: tuple(Point(int(updates), _number(at), _number(value)) for updates, at, value in points)
            for name, points in data.pop("curves").items()
        }
        return RunResult(curves=curves, samples_per_second=_number(data.pop("samples_per_second")), **data)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Results:
    """The folder of a comparison.

    Args:
        path: the folder.
    """

    path: Path

    @property
    def note(self) -> Path:
        """What all runs of the folder have in common."""
        return self.path / "comparison.json"

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse a folder that belongs to something else; nothing is written.

        Args:
            settings: what all runs have in common; values that JSON knows.

        Raises:
            UsageError: the folder is another comparison's or not one of ours.
        """
        try:
            entries = sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []
        except OSError as error:
            raise _foreign(self.path, str(error.strerror), "a folder, or a name for a new one") from error
        if not self.note.exists():
            if entries:
                raise _foreign(self.path, f"a folder with {entries[0]} in it and no comparison.json", "an empty folder")
            return
        kept, now = _object(self.note), json.loads(strict_json(settings))
        for name in dict.fromkeys([*now, *kept]):
            if now.get(name) != kept.get(name):
                what = f"{name.replace('_', ' ')} {_shown(kept.get(name))}"
                raise _foreign(self.path, f"a comparison with {what}", f"{_shown(now.get(name))}, as asked for now")

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Make the folder and note what its runs will have in common.

        Raises:
            RunError: it cannot be written.
        """
        write(self.note, strict_json(settings, indent=2) + "\n")

    def cuts(self, stages_per_worker: int) -> Path:
        """Where the plan lies by which the model was cut for rules that give a worker so many stages."""
        return self.path / ("cuts.toml" if stages_per_worker == 1 else f"cuts-{stages_per_worker}.toml")

    def plan(self, rule: str) -> Path:
        """Where the plan of a rule, as it was asked for, lies."""
        return self.path / "plans" / f"{_file_name(rule)}.toml"

    def find(self, variant: Variant, seed: int) -> RunResult | None:
        """The finished run, or None.

        Raises:
            UsageError: its file is damaged.
        """
        path = self._place(variant, seed)
        if not path.exists():
            return None
        try:
            found = RunResult.parse(path.read_text(encoding="utf-8"))
            if (found.variant, found.seed) != (variant.name, seed):
                raise ValueError(f"the run {found.variant}, seed {found.seed}")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"result {path}",
                got=f"{type(error).__name__}: {error}",
                expected=f"the run {variant.name}, seed {seed}, as `roundelay compare` has written it",
                remedy="Remove this file: its run is then done again, and no other.",
            ) from error
        return found

    def keep(self, variant: Variant, outcome: RunResult) -> None:
        """Write a finished run, whole or not at all.

        Raises:
            RunError: it cannot be written.
        """
        write(self._place(variant, outcome.seed), outcome.text())

    def under_way(self, variant: Variant, seed: int) -> Path:
        """The folder of a run that is not finished."""
        return self._place(variant, seed).with_suffix("")

    def _place(self, variant: Variant, seed: int) -> Path:
        return self.path / "runs" / f"{_file_name(variant.name)}.seed{seed}.json"


def write(path: Path, text: str) -> None:
    """Replace a file, making its folder first.

    Raises:
        RunError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten(path, error) from error
    with replacing_file(path) as file:
        file.write(text)


def _file_name(name: str) -> str:
    """A name for people; two that read alike as file names are told apart by a digest."""
    plain = re.sub(r"[^\w.@+-]", "_", name.replace("/", "--").replace(":", "."))
    usual = re.fullmatch(r"\w[\w.@+/:-]{,99}", name) is not None and name.isascii()
    return plain if usual else f"{plain[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _foreign(path.parent, f"a comparison.json that cannot be read ({error})", "one that can") from error
    if not isinstance(found, dict):
        raise _foreign(path.parent, "a comparison.json that holds no object", "one that does")
    return found


def _shown(value: Any) -> str:
    if value is None:
        return "none given"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _foreign(path: Path, got: str, expected: str) -> UsageError:
    return UsageError(
        f"the comparison's folder {path}",
        got=got,
        expected=expected,
        remedy="Choose another folder by --out, or repeat what was asked for there.",
    )
