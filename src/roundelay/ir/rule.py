"""Update rules as data: which version a forward and a backward read, and when gradients apply.

=============  ============  ===========  ================  ==============================================
rule           schedule      forward      backward          source
=============  ============  ===========  ================  ==============================================
``gpipe``      gpipe         W[t]         W[t]              GPipe; exact mini-batch SGD
``1f1b``       1f1b          W[t]         W[t]              PipeDream-flush; exact mini-batch SGD
``pipedream``  async-1f1b    W[U]         the forward's     PipeDream: weight stashing
``pipeoptim``  async-1f1b    P(W[U], s)   W[t]              PipeOptim, Algorithm 1; with ``stash`` the forward's
=============  ============  ===========  ================  ==============================================

U = U(k, g) is the number of updates done when stage k runs the forward of micro-batch g, t the number of g's batch,
s the distance that the prediction bridges (:data:`DISTANCES`). ``stash`` is every rule's default: it repeats no forward
and is the only mode whose backward is the derivative of the forward that ran; ``recompute`` and ``mixed`` hold fewer
weight versions.

A job file may register a rule of its own: ``roundelay.register_rule(UpdateRule(name="async", ...))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roundelay.errors import PlanError

Mode = Literal["stash", "recompute", "mixed"]
Distance = Literal["crossed", "lag", "lag+1"]

MODES: tuple[Mode, ...] = ("stash", "recompute", "mixed")

DISTANCES: dict[str, Distance] = {"improved": "crossed", "paper": "lag", "released-code": "lag+1"}
"""Predictor setting to the distance s it bridges: the updates really crossed, D-1-k, or D-k."""

NO_PREDICTOR = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """One rule.

    Args:
        name: how a plan calls it.
        schedule: name of the schedule it runs on, a key of ``schedules.SCHEDULES``.
        predicts: whether the forward reads predicted weights.
        stashes: whether the backward must read the weights that the forward read.
        modes: backward modes it allows, its default first.
        source: where it comes from.
    """

    name: str
    schedule: str
    predicts: bool
    stashes: bool
    modes: tuple[Mode, ...]
    source: str

    def backward_reads(self, mode: str) -> Literal["forward", "live"]:
        """Which weights a backward reads: those the forward read, or the live ones."""
        return "forward" if self.stashes or mode == "stash" else "live"


_BUILT_IN = (
    UpdateRule(name="gpipe", schedule="gpipe", predicts=False, stashes=False, modes=MODES, source="GPipe (2019)"),
    UpdateRule(
        name="1f1b", schedule="1f1b", predicts=False, stashes=False, modes=MODES, source="PipeDream-flush (2021)"
    ),
    UpdateRule(
        name="pipedream",
        schedule="async-1f1b",
        predicts=False,
        stashes=True,
        modes=("stash",),
        source="PipeDream (2019)",
    ),
    UpdateRule(
        name="pipeoptim",
        schedule="async-1f1b",
        predicts=True,
        stashes=False,
        modes=MODES,
        source="PipeOptim (2023), Algorithm 1",
    ),
)

_RULES: dict[str, UpdateRule] = {rule.name: rule for rule in _BUILT_IN}


def rules() -> tuple[UpdateRule, ...]:
    """Every known rule, built-in ones first."""
    return tuple(_RULES.values())


def register_rule(rule: UpdateRule) -> None:
    """Make a rule known by its name; registering the same rule again changes nothing.

    Raises:
        PlanError: another rule has this name, or the rule allows no or unknown modes.
    """
    known = _RULES.get(rule.name)
    if known is not None and known != rule:
        raise PlanError(
            f"rule {rule.name!r}",
            got="a second rule of this name",
            expected="a name other than " + ", ".join(_RULES),
            remedy="Register it under another name.",
        )
    if not rule.modes or not set(rule.modes) <= set(MODES):
        raise PlanError(
            f"rule {rule.name!r}",
            got=f"backward modes {rule.modes}",
            expected=f"at least one of {', '.join(MODES)}",
            remedy="Correct the rule's modes.",
        )
    if rule.stashes and rule.modes != ("stash",):
        raise PlanError(
            f"rule {rule.name!r}",
            got=f"stashes with backward modes {rule.modes}",
            expected="the mode stash alone: the others read the live weights",
            remedy='Give modes=("stash",), or stashes=False.',
        )
    _RULES[rule.name] = rule


def rule_named(name: str) -> UpdateRule:
    """The rule called ``name``.

    Raises:
        PlanError: there is none.
    """
    if name not in _RULES:
        raise PlanError(
            "the update rule",
            got=repr(name),
            expected="one of " + ", ".join(_RULES),
            remedy="Choose one of these, or register your own in the job file with roundelay.register_rule.",
        )
    return _RULES[name]
