"""The folder of a comparison: its settings, the plans of its rules, and an ordinary run folder for every run.

::

    comparison.json   what all runs have in common; another comparison is refused
    cuts.toml         the plan whose cuts all rules share; cuts-2.toml for rules with two stages per worker
    plans/            the plan of every rule
    runs/             VARIANT.seedN, as `roundelay train` writes it
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from roundelay.checkpoint.atomic_files import replacing_file, strict_json, unwritten
from roundelay.comparison.comparison_variants import Variant
from roundelay.comparison.run_results import RunResult, damaged_run, read_result
from roundelay.errors import UsageError
from roundelay.ir.plan import Plan
from roundelay.observe.run_folder import RunFolder
from roundelay.planning.planning import read_plan

FORMAT = 2
OTHER_FOLDER = "Put the comparison into another folder by --out."


@dataclass(frozen=True, slots=True)
class ComparisonFolder:
    """The folder of a comparison.

    Args:
        path: the folder.
    """

    path: Path

    @property
    def settings(self) -> Path:
        """What all runs of the folder have in common."""
        return self.path / "comparison.json"

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse a folder that belongs to something else; nothing is written.

        Args:
            settings: what all runs have in common; JSON values.

        Raises:
            UsageError: the folder belongs to another comparison, or to none.
        """
        try:
            entries = sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []
        except OSError as error:
            raise _refused(self.path, str(error.strerror), "a folder, or a name for a new one") from error
        if not self.settings.exists():
            if entries:
                raise _refused(self.path, f"a folder with {entries[0]} in it and no comparison.json", "an empty folder")
            return
        stored, current = _read_settings(self.settings), msgspec.json.decode(strict_json(settings))
        if stored.pop("format", 1) != FORMAT:
            raise _refused(self.path, "a comparison of another version of Roundelay", "one of this version")
        for name in dict.fromkeys([*current, *stored]):
            if current.get(name) != stored.get(name):
                got = f"a comparison with {name.replace('_', ' ')} {_shown(stored.get(name))}"
                raise _refused(self.path, got, f"{_shown(current.get(name))}, as given now")

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Create the folder and write what its runs will have in common.

        Raises:
            RunError: it cannot be written.
        """
        write(self.settings, strict_json({"format": FORMAT, **settings}, indent=2) + "\n")

    def cuts(self, stages_per_worker: int) -> Path:
        """The plan by which the model is cut for all rules with this number of stages per worker."""
        return self.path / ("cuts.toml" if stages_per_worker == 1 else f"cuts-{stages_per_worker}.toml")

    def plan(self, rule: str) -> Path:
        """The plan of a rule, as given by the user."""
        return self.path / "plans" / f"{_file_name(rule)}.toml"

    def result(self, variant: Variant, seed: int, plan: Plan) -> RunResult | None:
        """The result of a run with this plan, or None if it has not finished.

        Raises:
            UsageError: the run was made with another plan, or its files are damaged.
        """
        folder = RunFolder(self._run(variant, seed), (), None)
        if not folder.plan.exists():
            return None
        stored = read_plan(folder.plan, "Remove the folder of this run: it is then repeated, and no other.")
        if replace(stored, deadline_s=plan.deadline_s) != plan:
            raise damaged_run(folder, f"another plan than {self.plan(variant.rule_text)}")
        return read_result(variant.name, seed, folder)

    def open_run(self, variant: Variant, seed: int) -> RunFolder:
        """The folder of a run, created if absent.

        Raises:
            UsageError: it cannot be written.
        """
        folder = RunFolder(self._run(variant, seed), (), None)
        return folder if folder.plan.exists() else RunFolder.create(folder.path.parent, folder.path.name, point=False)

    def _run(self, variant: Variant, seed: int) -> Path:
        return self.path / "runs" / f"{_file_name(variant.name)}.seed{seed}"


def write(path: Path, text: str) -> None:
    """Replace a file, and create its folder.

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
    """A readable file name; an unusual name gets a digest, since two of them may read the same."""
    readable = re.sub(r"[^\w.=+-]", "_", name.replace("/", "--").replace(":", ".").replace("@", "="))
    usual = re.fullmatch(r"\w[\w.@+/:-]{,99}", name) is not None and name.isascii()
    return readable if usual else f"{readable[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise _refused(path.parent, f"a comparison.json that cannot be read ({error})", "a JSON object") from error


def _shown(value: Any) -> str:
    if value is None:
        return "none given"
    text = value if isinstance(value, str) else strict_json(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refused(path: Path, got: str, expected: str) -> UsageError:
    return UsageError(
        f"the comparison's folder {path}",
        got=got,
        expected=expected,
        remedy="Choose another folder by --out, or repeat the arguments of the comparison in it.",
    )
