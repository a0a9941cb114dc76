"""Modules whose operations a backward runs again: from the names that a plan says to ranges of the graph.

A name is the path of a module as ``named_modules`` has it. It may be a pattern, part by part: ``blocks.*`` stands for
``blocks.0`` and ``blocks.1``, each of them apart, and not for what lies inside of them. ``all`` is every segment whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from roundelay.errors import PlanError
from roundelay.ir.graph import Graph

ALL = "all"
"""In place of names: every segment of every stage, the loss apart."""


@dataclass(frozen=True, slots=True)
class Part:
    """Operations ``start`` to ``stop - 1``, one after the other, that a name of the plan stands for."""

    name: str
    start: int
    stop: int


def parts_of(graph: Graph, names: Sequence[str]) -> tuple[Part, ...]:
    """What is to be run again, in the order of the graph; a module that is called twice has two parts.

    Args:
        graph: the logical graph.
        names: of the plan.

    Raises:
        PlanError: a name stands for no module that computes, or for what another one stands for already.
    """
    if ALL in names:
        if len(names) > 1:
            raise _refused(", ".join(names), "all, or names of modules", "Leave all out, or the names.")
        return (Part(ALL, 0, len(graph.ops)),)
    paths: dict[str, str] = {}
    for name in names:
        for path in _matched(graph, name):
            other = next((chosen for chosen in paths if _inside(path, chosen) or _inside(chosen, path)), None)
            if other is not None:
                got = f"{path!r}, by {name!r}, beside {other!r}, by {paths[other]!r}"
                raise _refused(got, "modules of which none contains another", "Leave one of them out.")
            paths[path] = name
    return tuple(sorted(_runs(graph, paths), key=lambda part: part.start))


def parts_within(graph: Graph, path: str) -> tuple[Part, ...]:
    """The operations of one module, by its path; none if it computes nothing."""
    return tuple(_runs(graph, {path: path}))


def _runs(graph: Graph, paths: dict[str, str]) -> Iterator[Part]:
    for path, name in paths.items():
        within = [i for i, op in enumerate(graph.ops) if _inside(op.module, path)]
        known = set(within)
        starts = [i for i in within if i - 1 not in known]
        stops = [i + 1 for i in within if i + 1 not in known]
        yield from (Part(name, start, stop) for start, stop in zip(starts, stops, strict=True))


def _matched(graph: Graph, name: str) -> list[str]:
    known = _modules(graph)
    found = [path for path in known if _fits(path.split("."), name.split("."))]
    if not found:
        near = difflib.get_close_matches(name, known, n=4, cutoff=0.4) or known[:4]
        raise _refused(
            f"{name!r}, a name of no module that computes something in this model",
            f"{ALL}, or paths of modules such as {', '.join(near)}; * stands for one part of a path",
            "roundelay.capture(job).graph has the module of every operation.",
        )
    return found


def _modules(graph: Graph) -> list[str]:
    """Every module with an operation in it, outer ones before what they contain."""
    ways = [op.module.split(".") for op in graph.ops if op.module]
    return list(dict.fromkeys(".".join(way[: i + 1]) for way in ways for i in range(len(way))))


def _fits(path: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(path) == len(pattern) and all(map(fnmatchcase, path, pattern))


def _inside(path: str, other: str) -> bool:
    return path == other or path.startswith(other + ".")


def idle(name: str, why: str) -> PlanError:
    """What to say of a name whose operations can be run again to no use, or not at all."""
    return _refused(f"{name!r}, {why}", "modules that keep something for their backward", "Leave it out.")


def _refused(got: str, expected: str, remedy: str) -> PlanError:
    return PlanError("recompute of the plan", got=got, expected=expected, remedy=remedy)
