"""The choices that say how many workers hold a stage, and what each of them has of it."""

from __future__ import annotations

import math
import re
from pathlib import Path

from roundelay.errors import PlanError, listed
from roundelay.ir.given_signatures import GivenSignatures
from roundelay.ir.residence import SHARDED
from roundelay.planner.cluster import Cluster, read_cluster
from roundelay.planner.plan_options import Choices, flag
from roundelay.schedules import PIPELINE


def shards_of(choices: Choices) -> tuple[int, int]:
    """The groups of ``--hybrid`` and the replicas of each, or zeros.

    Raises:
        PlanError: it is no such pair, or is given with what it replaces.
    """
    if choices.hybrid is None:
        return 0, 0
    if others := [flag(name) for name in ("data_parallel", "zero") if name in choices.names()]:
        raise PlanError(
            f"--hybrid {choices.hybrid} with {listed(others)}",
            got="both",
            expected="one of them: RxS are R x S replicas that store parts of the weights",
            remedy=f"Leave {listed(others)} out.",
        )
    found = re.fullmatch(r"(\d+)x(\d+)", choices.hybrid)
    groups, shards = map(int, found.groups()) if found else (0, 0)
    if groups < 2 or shards < 2:
        raise PlanError(
            "--hybrid",
            got=choices.hybrid,
            expected="RxS, such as 2x4: 2 or more groups of 2 or more replicas",
            remedy="For one group give --data-parallel and --zero 3; for groups of one, --data-parallel alone.",
        )
    return groups, shards


def replicas_of(choices: Choices) -> int:
    """R, as given, or 1.

    Raises:
        PlanError: it is no positive number.
    """
    if (size := math.prod(shards_of(choices))) > 0:
        return size
    replicas = 1 if choices.data_parallel is None else choices.data_parallel
    if replicas < 1:
        raise PlanError("replicas", got=str(replicas), expected="at least 1", remedy="Give --data-parallel 1 or more.")
    return replicas


def signatures_of(choices: Choices) -> GivenSignatures | None:
    """Those that are given, or stand in the file that is.

    Raises:
        PlanError: they cannot be read, or --tensor-parallel is given as well.
    """
    own, tensor_parallel = choices.signatures, choices.tensor_parallel or 1
    if own is None or isinstance(own, GivenSignatures):
        return own
    if tensor_parallel > 1:
        raise PlanError(
            "--signatures with --tensor-parallel",
            got=f"{own} and {tensor_parallel}",
            expected="one of them: the file has the mesh and the signatures that the other would find",
            remedy="Leave --tensor-parallel out.",
        )
    return read_signatures(Path(own))


def cluster_of(choices: Choices) -> Cluster | None:
    """The workers that are declared, or stand in the file that is given; raises as :func:`read_cluster`."""
    own = choices.cluster
    return own if own is None or isinstance(own, Cluster) else read_cluster(Path(own), "workers")


def parts_of(choices: Choices) -> int:
    """Workers of the mesh, as given, or 1.

    Raises:
        PlanError: it is no positive number.
    """
    if (own := signatures_of(choices)) is not None:
        return own.size
    parts = 1 if choices.tensor_parallel is None else choices.tensor_parallel
    if parts < 1:
        raise PlanError(
            "--tensor-parallel", got=str(parts), expected="at least 1", remedy="Give --tensor-parallel 1 or more."
        )
    return parts


def zero_of(choices: Choices) -> int:
    """The level of ``--zero``, as given, or 0.

    Raises:
        PlanError: it is not built, or there is one replica.
    """
    level = (choices.zero or 0) if choices.hybrid is None else len(SHARDED)
    if not 0 <= level <= len(SHARDED):
        known = f"0 to {len(SHARDED)}"
        raise PlanError("--zero", got=str(level), expected=known, remedy=f"Give --zero {len(SHARDED)}.")
    layout = PIPELINE if choices.layout is None else choices.layout
    if level and layout != PIPELINE:
        raise PlanError(
            f"--zero {level}" if choices.hybrid is None else f"--hybrid {choices.hybrid}",
            got=f"--layout {layout}, in which optimizer states are whole",
            expected="a pipeline with --data-parallel 2 or more",
            remedy="Leave --zero out, or --layout.",
        )
    if level and replicas_of(choices) == 1:
        raise PlanError(
            f"--zero {level}",
            got="one replica, whose optimizer has all states",
            expected="--data-parallel 2 or more, among which they are divided",
            remedy="Give --data-parallel, or leave --zero out.",
        )
    return level


def read_signatures(path: Path) -> GivenSignatures:
    """Read signatures from a file.

    Raises:
        PlanError: it cannot be read, or says something else.
    """
    try:
        return GivenSignatures.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"the file of signatures {path}",
            got=str(error),
            expected="TOML with `mesh`, [parameters] and [outputs], as in a plan",
            remedy="Correct --signatures.",
        ) from error
