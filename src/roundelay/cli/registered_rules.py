"""Whether a job may register update rules of its own, judged from source text before the job is run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distributions
from pathlib import Path
from sysconfig import get_paths

_REGISTERS = ("register_rule", "_RULES")
_DYNAMIC = ("import_module", "__import__", "runpy", "exec(", "sys.path")
"""Texts without which a module registers no rule, and imports only what its import statements name."""

_MOST_FILES = 300


def may_register_rules(job_file: Path) -> bool:
    """Whether running the job file might register a rule; True where its text and its imports do not tell.

    Its own modules are read, and those that they import; an installed package can register rules only if it requires
    roundelay.
    """
    folder, seen, waiting = job_file.resolve().parent, set[Path](), [job_file]
    while waiting:
        path = waiting.pop()
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        try:
            text = path.read_text(encoding="utf-8")
            imported = set(_imported(ast.parse(text)))
        except (OSError, ValueError, SyntaxError):
            return path != job_file  # a job file that cannot be read registers nothing
        if len(seen) > _MOST_FILES or any(word in text for word in (*_REGISTERS, *_DYNAMIC)):
            return True
        for name in imported - sys.stdlib_module_names - {"roundelay"}:
            files = _own_files(PathFinder.find_spec(name, [str(folder), str(path.parent), *sys.path]))
            if files is None:
                return True
            waiting += files
    return _is_extended()


def _imported(tree: ast.Module) -> Iterator[str]:
    """Top-level names of the modules that import statements name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _own_files(spec: ModuleSpec | None) -> list[Path] | None:
    """Files of a module of the person's own: none of an installed one; None if it cannot be found."""
    if spec is None:
        return None
    places = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
    file = Path(spec.origin).resolve() if spec.origin else None
    installed = [Path(get_paths()[name]).resolve() for name in ("purelib", "platlib", "stdlib")]
    if any(place.is_relative_to(one) for place in [*places, *([file] if file else [])] for one in installed):
        return []
    if places:
        return [path for place in places for path in place.rglob("*.py")]
    return None if file is None else [file] if file.suffix == ".py" else []


def _is_extended() -> bool:
    """Whether an installed distribution requires roundelay."""
    return any(
        line.split(";")[0].strip().lower().startswith("roundelay")
        for one in distributions()
        for line in one.metadata.get_all("Requires-Dist") or ()
    )
