"""Update rules as data: which version of the weights each forward and each backward reads.

=====================  ==================  ===================  ======================================================
rule                   forward             backward             source
=====================  ==================  ===================  ======================================================
``gpipe``, ``1f1b``    W[t]                W[t]                 GPipe, PipeDream-flush: exact mini-batch SGD
``zb-h1``              W[t]                W[t]                 Zero bubble, H1: 1F1B with backwards in two halves
``zb-v``               W[t]                W[t]                 Zero bubble, V: the same, with two stages per worker
``pipedream``          W[U]                the forward's        PipeDream: weight stashing
``ravnest``            W[U]                the forward's        Ravnest: no order, what can run does (Algorithm 1)
``pipedream-vertical`` W[U(0, g)]          the forward's        PipeDream with vertical sync
``pipedream-2bw``      W[t-1]              the forward's        PipeDream-2BW: two versions
``cdp-v1``             W[t-1]              the forward's        Cyclic Data Parallelism, rule 1
``cdp-v2``             W[t] or W[t-1]      the forward's        Cyclic Data Parallelism, rule 2
``spectrain``          P(W[U], to B(0,g))  P(W[t], to B(0,g))   SpecTrain: both passes look to stage 0's backward
``pipeoptim``          P(W[U], s)          W[t]                 PipeOptim, Algorithm 1; with ``stash`` the forward's
``async``              W[U]                W[t]                 no correction at all
``lookahead``          P(W[U], 1)          P(W[t], 1)           Nesterov's look-ahead in place of a second version
``rehearse``           P(W[U], s)          W[t]                 predicts with the gradients that the batch has summed
=====================  ==================  ===================  ======================================================

``gpipe``, ``1f1b``, ``zb-h1`` and ``zb-v`` run on the schedules of the same names, ``ravnest`` on ``free``, all others
on ``async-1f1b``.
U = U(k, g) is the number of updates done when stage k runs the forward of micro-batch g, t the number of g's batch, s
the number of updates that the prediction looks ahead (:data:`DISTANCES`). The mode ``stash`` recomputes no forward and
is the only one whose backward is the derivative of the forward that ran; ``recompute`` and ``mixed`` hold fewer weight
versions.

A job file may register a rule of its own. It may choose between the newest and the previous version by any table, as
the general rule of Cyclic Data Parallelism does (equation 5): ``UpdateRule(name="mine", versions="table",
fresh=lambda i, j, d: j == d, ...)`` reads the newest version on the last stage only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from roundelay.errors import PlanError, did_you_mean

Mode = Literal["stash", "recompute", "mixed"]
Distance = Literal["crossed", "lag", "lag+1"]
Versions = Literal["newest", "entry", "table"]
Target = Literal["backward", "entry", "next"]
Fresh = Callable[[int, int, int], bool]
StaggeredFresh = Callable[[int, int, int, int], bool]

MODES: tuple[Mode, ...] = ("stash", "recompute", "mixed")

DISTANCES: dict[str, Distance] = {"improved": "crossed", "paper": "lag", "released-code": "lag+1", "partial": "crossed"}
"""Predictor setting to its distance s: the updates between forward and backward, D-1-k, or D-k."""

FROM_STATE = ("improved", "paper", "released-code")
"""Settings that read only weights and optimizer state, so that a prediction is valid until the next update."""

NO_PREDICTOR = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """One update rule.

    Args:
        name: its name in plans.
        schedule: name of the schedule it runs on, a key of ``schedules.SCHEDULES``.
        predicts: whether the forward reads predicted weights.
        stashes: whether the backward must read the weights that the forward read.
        modes: backward modes it allows, its default first.
        source: the paper that it comes from.
        versions: which version the forward reads: the ``newest`` of its stage; the newest that stage 0 had when the
            micro-batch entered there (``entry``); or W[t] or W[t-1] by ``table``.
        fresh: the table: (i, j, D) to whether micro-batch i of a batch reads W[t] on stage j; i and j count from 1.
        staggered: the table where micro-batches start evenly staggered, if it depends on their number: (i, j, D, N), of
            N micro-batches; ``fresh`` by default.
        target: for a rule that predicts, the moment for which it predicts: the stage's own ``backward``, stage 0's
            backward (``entry``), or after the ``next`` update. With the last two, backwards read predicted weights too.
        predictors: settings of the predictor that it allows, its default first.
    """

    name: str
    schedule: str
    predicts: bool
    stashes: bool
    modes: tuple[Mode, ...]
    source: str
    versions: Versions = "newest"
    fresh: Fresh | None = None
    staggered: StaggeredFresh | None = None
    target: Target = "backward"
    predictors: tuple[str, ...] = FROM_STATE

    def backward_reads(self, mode: str) -> Literal["forward", "live", "ahead"]:
        """Return which weights a backward reads: its forward's, the live ones, or those predicted from these."""
        if self.stashes or mode == "stash":
            return "forward"
        return "ahead" if self.predicts and self.target != "backward" else "live"

    def is_fresh(self, micro_batch: int, stage: int, num_stages: int, num_staggered: int = 0) -> bool:
        """Return whether micro-batch i reads W[t] on stage j by the table of a rule that has one, and not W[t-1].

        Args:
            micro_batch: i, from 1.
            stage: j, from 1.
            num_stages: D.
            num_staggered: N where N micro-batches start evenly staggered, as cyclic data parallelism has them; 0 where
                a pipeline runs them.
        """
        assert self.fresh is not None, "a rule that reads versions by table"
        numbers: tuple[int, ...] = micro_batch, stage, num_stages
        try:
            if num_staggered and self.staggered is not None:
                numbers = *numbers, num_staggered
                said = self.staggered(micro_batch, stage, num_stages, num_staggered)
            else:
                said = self.fresh(micro_batch, stage, num_stages)
        except Exception as error:
            raise self._no_table(numbers, f"{type(error).__name__}: {error}") from error
        if said not in (True, False):
            raise self._no_table(numbers, repr(said))
        return bool(said)

    def _no_table(self, numbers: tuple[int, ...], got: str) -> PlanError:
        return PlanError(
            f"the table of rule {self.name!r} at ({', '.join(map(str, numbers))})",
            got=got,
            expected="True for W[t], or False for W[t-1], for every micro-batch i and stage j, from 1",
            remedy="Correct `fresh` of the rule, or `staggered`.",
        )


ASYNC = "async-1f1b"
"""Schedule of the rules that never flush."""


def _previous(micro_batch: int, stage: int, num_stages: int) -> bool:
    """W[t-1] everywhere."""
    return False


def _as_early_as_possible(micro_batch: int, stage: int, num_stages: int) -> bool:
    """W[t] as soon as a stage has it (Cyclic Data Parallelism, section 3.2, with as many workers as stages)."""
    return micro_batch + stage >= num_stages + 1


def _as_early_as_staggered(micro_batch: int, stage: int, num_stages: int, num_staggered: int) -> bool:
    """The same where N micro-batches start 2D / N steps after one another: i + j >= N + 1 if D = N."""
    return num_staggered * (stage - 1) >= num_stages * (num_staggered - micro_batch)


def _rule(name: str, source: str, **fields: object) -> UpdateRule:
    """Create a built-in rule: by default asynchronous, with stashed weights."""
    usual: dict[str, object] = {"schedule": ASYNC, "predicts": False, "stashes": True, "modes": ("stash",)}
    return UpdateRule(name=name, source=source, **{**usual, **fields})  # type: ignore[arg-type]


_BUILT_IN = (
    _rule("gpipe", "GPipe (2019)", schedule="gpipe", stashes=False, modes=MODES),
    _rule("1f1b", "PipeDream-flush (2021)", schedule="1f1b", stashes=False, modes=MODES),
    _rule("zb-h1", "Zero Bubble Pipeline Parallelism (2023), ZB-H1", schedule="zb-h1", stashes=False, modes=MODES),
    _rule("zb-v", "Zero Bubble Pipeline Parallelism (2023), ZB-V", schedule="zb-v", stashes=False, modes=MODES),
    _rule("pipedream", "PipeDream (2019)"),
    _rule("ravnest", "Ravnest (2024), Algorithm 1", schedule="free"),
    _rule("pipedream-vertical", "PipeDream (2019), vertical sync", versions="entry"),
    _rule("pipedream-2bw", "PipeDream-2BW (2021)", versions="table", fresh=_previous),
    _rule("cdp-v1", "Cyclic Data Parallelism (2024), CDP-v1", versions="table", fresh=_previous),
    _rule(
        "cdp-v2",
        "Cyclic Data Parallelism (2024), CDP-v2",
        versions="table",
        fresh=_as_early_as_possible,
        staggered=_as_early_as_staggered,
    ),
    _rule(
        "spectrain",
        "SpecTrain (2018)",
        predicts=True,
        stashes=False,
        modes=("mixed", "recompute"),
        target="entry",
        predictors=("improved", "paper"),
    ),
    _rule("pipeoptim", "PipeOptim (2023), Algorithm 1", predicts=True, stashes=False, modes=MODES),
    _rule("async", "asynchronous 1F1B without correction", stashes=False, modes=("mixed", "recompute")),
    _rule(
        "lookahead",
        "Nesterov's look-ahead against a delay of one",
        predicts=True,
        stashes=False,
        modes=("mixed", "recompute", "stash"),
        target="next",
        predictors=("improved",),
    ),
    _rule(
        "rehearse",
        "Roundelay: predicts an update from the gradients that its batch has summed so far",
        predicts=True,
        stashes=False,
        modes=("mixed", "recompute"),
        predictors=("partial",),
    ),
)

BUILT_IN = tuple(rule.name for rule in _BUILT_IN)
"""Names of the rules that no job has registered."""

_RULES: dict[str, UpdateRule] = {rule.name: rule for rule in _BUILT_IN}


def rules() -> tuple[UpdateRule, ...]:
    """Return every registered rule, built-in ones first."""
    return tuple(_RULES.values())


def register_rule(rule: UpdateRule) -> None:
    """Register a rule under its name; registering the same rule again changes nothing.

    Raises:
        PlanError: another rule has this name, or the rule's fields contradict each other.
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
    if (rule.versions == "table") != (rule.fresh is not None):
        raise PlanError(
            f"rule {rule.name!r}",
            got=f"versions {rule.versions!r} {'without' if rule.fresh is None else 'with'} a table",
            expected='fresh=... if and only if versions="table"',
            remedy="Give both or neither.",
        )
    if rule.predicts and rule.versions != "newest":
        raise PlanError(
            f"rule {rule.name!r}",
            got=f"a prediction from versions {rule.versions!r}",
            expected='versions="newest"',
            remedy="Predict from the newest version, or do not predict.",
        )
    if not rule.predictors or not set(rule.predictors) <= set(DISTANCES):
        raise PlanError(
            f"rule {rule.name!r}",
            got=f"predictors {rule.predictors}",
            expected=f"at least one of {', '.join(DISTANCES)}",
            remedy="Correct the rule's predictors.",
        )
    if "partial" in rule.predictors and (rule.target != "backward" or "stash" in rule.modes):
        raise PlanError(
            f"rule {rule.name!r}",
            got=f"predictor partial with target {rule.target!r} and modes {', '.join(rule.modes)}",
            expected='target="backward", and modes without stash: each micro-batch has a prediction of its own',
            remedy="Remove one of them.",
        )
    if rule.stashes and rule.modes != ("stash",):
        raise PlanError(
            f"rule {rule.name!r}",
            got=f"stashes=True with backward modes {rule.modes}",
            expected="only the mode stash: the others read the live weights",
            remedy='Give modes=("stash",), or stashes=False.',
        )
    _RULES[rule.name] = rule


def rule_named(name: str) -> UpdateRule:
    """Return the rule called ``name``.

    Raises:
        PlanError: there is none.
    """
    if name not in _RULES:
        raise PlanError(
            "the update rule",
            got=repr(name),
            expected="one of " + ", ".join(_RULES),
            remedy=did_you_mean(name, _RULES)
            + "Choose one of these, or register your own in the job file with roundelay.register_rule.",
        )
    return _RULES[name]
