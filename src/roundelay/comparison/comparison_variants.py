"""Variants of a comparison: an optimizer and an update rule, with its predictor and backward mode, parsed from text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundelay.errors import UsageError, did_you_mean
from roundelay.ir.rule import DISTANCES, MODES, rule_named, rules
from roundelay.schedules import PIPELINE

OWN = "job"
"""Name of the job's own optimizer."""

ALL = "all"

OPTIMIZERS: Mapping[str, tuple[str, float, dict[str, Any]]] = {
    "sgd": ("SGD", 0.1, {}),
    "sgdm": ("SGD", 0.05, {"momentum": 0.9}),
    "nesterov": ("SGD", 0.05, {"momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", 1e-3, {}),
    "adamw": ("AdamW", 1e-3, {"weight_decay": 0.01}),
}
"""Name of an optimizer to its class in torch.optim, its default learning rate and its settings."""

CUTS_FROM = {1: "1f1b", 2: "zb-v"}
"""Number of stages per worker to the rule whose plan cuts the model for all rules with that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One optimizer with one rule: a row of the comparison's table.

    Args:
        optimizer: one of :data:`OPTIMIZERS`, or :data:`OWN`.
        rate: its learning rate; None for the job's own optimizer.
        rule: name of the update rule.
        predictor: setting of its predictor, or None for the rule's default.
        backward: its backward mode, or None for the rule's default.
    """

    optimizer: str
    rate: float | None
    rule: str
    predictor: str | None = None
    backward: str | None = None

    @property
    def rule_text(self) -> str:
        """The rule as given by the user: ``pipeoptim:paper:mixed``."""
        return ":".join(part for part in (self.rule, self.predictor, self.backward) if part)

    @property
    def optimizer_text(self) -> str:
        """Optimizer and learning rate: ``adamw@0.001``, or ``job``."""
        return self.optimizer if self.rate is None else f"{self.optimizer}@{self.rate:g}"

    @property
    def name(self) -> str:
        """Optimizer and rule: ``adamw@0.001/pipeoptim:paper``."""
        return f"{self.optimizer_text}/{self.rule_text}"


def rule_of_cuts(layout: str | None, per_worker: int = 1) -> str:
    """The rule whose plan cuts the model for all rules of a comparison.

    Args:
        layout: of the comparison.
        per_worker: stages of each worker of a pipeline.
    """
    return CUTS_FROM[per_worker] if layout in (None, PIPELINE) else "cdp-v1"


def variants(
    rule_texts: Sequence[str], optimizers: Sequence[str] = (), rates: Mapping[str, float] | None = None
) -> tuple[Variant, ...]:
    """Every optimizer combined with every rule, in the given order.

    Args:
        rule_texts: each ``RULE[:PREDICTOR][:MODE]``, or ``all`` for every known rule.
        optimizers: names from :data:`OPTIMIZERS`; the job's own if empty.
        rates: optimizer to learning rate, in place of its default.

    Raises:
        UsageError: a name is unknown or given twice, or a learning rate is not positive.
    """
    texts = [text for given in rule_texts for text in ([rule.name for rule in rules()] if given == ALL else [given])]
    parsed = [_parse_rule(text) for text in texts]
    chosen: list[tuple[str, float | None]] = [(name, _rate(name, dict(rates or {}))) for name in optimizers]
    chosen = chosen or [(OWN, None)]
    for name in set(rates or {}) - set(optimizers):
        raise _refused(f"a learning rate for {name!r}", "learning rates of compared optimizers only", "--optimizers")
    combined = tuple(
        Variant(optimizer=name, rate=rate, rule=rule, predictor=predictor, backward=backward)
        for name, rate in chosen
        for rule, predictor, backward in parsed
    )
    _check_distinct(combined)
    return combined


def _parse_rule(text: str) -> tuple[str, str | None, str | None]:
    """Rule, predictor and backward mode; predictor and mode may come in any order."""
    name, *rest = (part.strip() for part in text.split(":"))
    rule_named(name)
    predictors = [part for part in rest if part in DISTANCES]
    modes = [part for part in rest if part in MODES]
    if len(predictors) > 1 or len(modes) > 1 or len(predictors) + len(modes) != len(rest):
        expected = f"RULE[:PREDICTOR][:MODE], of {', '.join(DISTANCES)} and {', '.join(MODES)}"
        odd = [part for part in rest if part not in (*DISTANCES, *MODES)]
        raise _refused(repr(text), expected, "--rules", did_you_mean(odd[0], [*DISTANCES, *MODES]) if odd else "")
    return name, *(part[0] if part else None for part in (predictors, modes))  # type: ignore[return-value]


def _rate(name: str, rates: Mapping[str, float]) -> float:
    if name not in OPTIMIZERS:
        near = did_you_mean(name, OPTIMIZERS)
        raise _refused(repr(name), f"any of {', '.join(OPTIMIZERS)}", "--optimizers", near)
    rate = rates.get(name, OPTIMIZERS[name][1])
    if not (math.isfinite(rate) and rate > 0):
        raise _refused(f"{name}={rate}", "a learning rate above zero", "--lr")
    return rate


def _check_distinct(combined: Sequence[Variant]) -> None:
    names = [variant.name for variant in combined]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not combined:
        raise _refused(f"{twice[0]} twice" if twice else "none", "one rule at least, each once", "--rules")


def parse_pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    """Parse ``NAME=VALUE`` texts of an option that can be given several times, or once with commas.

    Raises:
        UsageError: a text has another form, or a name is given twice.
    """
    values: dict[str, str] = {}
    for part in (part.strip() for text in texts for part in text.split(",") if part.strip()):
        match = re.fullmatch(r"([^=]+)=([^=]+)", part)
        if match is None or match[1] in values:
            raise _refused(repr(part), "NAME=VALUE, each name once", option)
        values[match[1].strip()] = match[2].strip()
    return values


def parse_numbers(texts: Sequence[str], option: str) -> dict[str, float]:
    """Parse ``NAME=NUMBER`` texts of an option.

    Raises:
        UsageError: a text has another form, a name is given twice, or a value is not a finite number.
    """
    values = {}
    for name, text in parse_pairs(texts, option).items():
        try:
            values[name] = float(text)
        except ValueError:
            values[name] = math.nan
        if not math.isfinite(values[name]):
            raise _refused(f"{name}={text}", "NAME=NUMBER", option)
    return values


def _refused(got: str, expected: str, option: str, near: str = "") -> UsageError:
    return UsageError(f"{option} of the comparison", got=got, expected=expected, remedy=f"{near}Correct {option}.")
