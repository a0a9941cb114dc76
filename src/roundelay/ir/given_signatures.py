"""Signatures that a person gives: a mesh, and how parameters and results of operations lie on it, as a text."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from roundelay.errors import PlanError
from roundelay.ir.plan import PARSERS, Lay, Plan
from roundelay.ir.typed_text import Size, convert


@dataclass(frozen=True, slots=True)
class GivenSignatures:
    """The tables of a plan that say what is split, which can also stand in a file of their own.

    Args:
        mesh: workers by axis.
        parameters: signatures by name or pattern.
        outputs: signatures of results, by name or pattern of modules and operations.
    """

    mesh: Mapping[str, Size] = field(hash=False)
    parameters: Mapping[str, Lay] = field(default_factory=dict, hash=False)
    outputs: Mapping[str, Lay] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis} = {size}" for axis, size in self.mesh.items())
        return f"a file with mesh = {{ {mesh} }}, [parameters] and [outputs]"

    @property
    def size(self) -> int:
        """Workers of a stage."""
        return math.prod(self.mesh.values())

    @staticmethod
    def of(plan: Plan) -> GivenSignatures:
        """Those of a plan."""
        return GivenSignatures(plan.mesh, plan.parameters, plan.outputs)

    @staticmethod
    def parse(text: str) -> GivenSignatures:
        """Those that a TOML text gives; the text may be a whole plan, of which the rest is left alone.

        Raises:
            PlanError: it is no such text.
        """
        try:
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refused(str(error)) from error
        known = [one.name for one in fields(GivenSignatures)]
        unknown = [] if "format" in table else [name for name in table if name not in known]
        if unknown or "mesh" not in table:
            raise _refused(f"the field {unknown[0]!r}" if unknown else "no `mesh`")
        own: dict[str, Any] = {name: value for name, value in table.items() if name in known}
        try:
            return convert(own, GivenSignatures, PARSERS)
        except msgspec.ValidationError as error:
            raise _refused(str(error)) from error


def _refused(got: str) -> PlanError:
    return PlanError(
        "the signatures",
        got=got,
        expected="TOML such as `mesh = { tensor = 2 }`, and below [parameters] or [outputs] lines such as "
        '`"*.up.weight" = [["tensor", "S(0)"]]`',
        remedy="Correct the file of --signatures; the tables of a plan can be copied to it.",
    )
