"""Modules whose operations a backward recomputes: from the names in a plan to ranges of the graph.

A name is the path of a module as in ``named_modules``. Each part of the path may be a pattern: ``blocks.*`` stands for
the modules ``blocks.0`` and ``blocks.1``, but not for the modules inside of them. ``all`` stands for every segment.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from roundelay.errors import PlanError
from roundelay.ir.graph import Graph

ALL = "all"
"""In place of names: every segment of every stage, except the loss."""


@dataclass(frozen=True, slots=True)
class RecomputeRange:
    """Consecutive operations, ``start`` to ``stop - 1``, that a name in the plan stands for."""

    name: str
    start: int
    stop: int


def recompute_ranges(graph: Graph, names: Sequence[str]) -> tuple[RecomputeRange, ...]:
    """Return the ranges to recompute, in the order of the graph; a module that is called twice has two.

    Args:
        graph: the logical graph.
        names: names in the plan.

    Raises:
        PlanError: a name matches no module with operations, or a module that another name matches already.
    """
    if ALL in names:
        if len(names) > 1:
            raise _refused(", ".join(names), "all, or names of modules", "Remove all, or the names.")
        return (RecomputeRange(ALL, 0, len(graph.ops)),)
    paths: dict[str, str] = {}
    for name in names:
        for path in _matched(graph, name):
            other = next((chosen for chosen in paths if _inside(path, chosen) or _inside(chosen, path)), None)
            if other is not None:
                got = f"{path!r} (by {name!r}) and {other!r} (by {paths[other]!r})"
                raise _refused(got, "modules of which none contains another", "Remove one of them.")
            paths[path] = name
    return tuple(sorted(_runs(graph, paths), key=lambda part: part.start))


def ranges_within(graph: Graph, path: str) -> tuple[RecomputeRange, ...]:
    """Return the operations of the module at ``path``; none if it computes nothing."""
    return tuple(_runs(graph, {path: path}))


def _runs(graph: Graph, paths: dict[str, str]) -> Iterator[RecomputeRange]:
    for path, name in paths.items():
        within = [i for i, op in enumerate(graph.ops) if _inside(op.module, path)]
        known = set(within)
        starts = [i for i in within if i - 1 not in known]
        stops = [i + 1 for i in within if i + 1 not in known]
        yield from (RecomputeRange(name, start, stop) for start, stop in zip(starts, stops, strict=True))


def _matched(graph: Graph, name: str) -> list[str]:
    known = _modules(graph)
    paths = [path for path in known if _fits(path.split("."), name.split("."))]
    if not paths:
        near = difflib.get_close_matches(name, known, n=4, cutoff=0.4) or known[:4]
        raise _refused(
            f"{name!r}, which matches no module with operations in this model",
            f"{ALL}, or paths of modules such as {', '.join(near)}; * stands for one part of a path",
            "roundelay.capture(job).graph has the module of every operation.",
        )
    return paths


def _modules(graph: Graph) -> list[str]:
    """Return the path of every module with an operation in it, outer ones before those that they contain."""
    paths = [op.module.split(".") for op in graph.ops if op.module]
    return list(dict.fromkeys(".".join(parts[: i + 1]) for parts in paths for i in range(len(parts))))


def _fits(path: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(path) == len(pattern) and all(map(fnmatchcase, path, pattern))


def _inside(path: str, other: str) -> bool:
    return path == other or path.startswith(other + ".")


def nothing_to_recompute(name: str, why: str) -> PlanError:
    """Return the error for a name whose operations cannot be recomputed, or would save no memory."""
    return _refused(f"{name!r}, {why}", "modules that keep something for their backward", "Remove it.")


def _refused(got: str, expected: str, remedy: str) -> PlanError:
    return PlanError("recompute of the plan", got=got, expected=expected, remedy=remedy)
