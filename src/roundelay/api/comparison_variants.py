"""What a comparison compares: an optimizer beside an update rule with predictor and backward mode, read from text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from roundelay.errors import UsageError
from roundelay.ir.rule import MODES, rule_named, rules
from roundelay.job import Named, OptimizerFactory
from roundelay.weight_prediction import PREDICTORS

OWN = "job"
"""How the job's own optimizer is called."""

ALL = "all"

_FACTORIES: Mapping[str, tuple[Any, float, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, 0.1, {}),
    "sgdm": (torch.optim.SGD, 0.05, {"momentum": 0.9}),
    "nesterov": (torch.optim.SGD, 0.05, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, 1e-3, {}),
    "adamw": (torch.optim.AdamW, 1e-3, {"weight_decay": 0.01}),
}
"""Name of an optimizer to its class, its learning rate when none is given, and its settings."""

OPTIMIZERS = tuple(_FACTORIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One line of a comparison.

    Args:
        optimizer: one of :data:`OPTIMIZERS`, or :data:`OWN`.
        rate: its learning rate; None with the job's own.
        rule: name of the update rule.
        predictor: setting of its predictor, or None for the rule's first.
        backward: its backward mode, or None for the rule's first.
    """

    optimizer: str
    rate: float | None
    rule: str
    predictor: str | None = None
    backward: str | None = None

    @property
    def rule_text(self) -> str:
        """As it was asked for: ``pipeoptim:paper:mixed``."""
        return ":".join(part for part in (self.rule, self.predictor, self.backward) if part)

    @property
    def optimizer_text(self) -> str:
        """``adamw@0.001``, or ``job``: what tells two lines of one rule apart."""
        return self.optimizer if self.rate is None else f"{self.optimizer}@{self.rate:g}"

    @property
    def name(self) -> str:
        """The whole line in one word."""
        return f"{self.optimizer_text}/{self.rule_text}"

    def factory(self) -> OptimizerFactory | None:
        """What makes the optimizer from named parameters; None for the job's own."""
        if self.optimizer == OWN:
            return None
        kind, _, settings = _FACTORIES[self.optimizer]
        return partial(_made, kind, {"lr": self.rate, **settings})


def _made(kind: Any, settings: Mapping[str, Any], named: Named) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind(named, **settings)
    return made


def variants(
    asked: Sequence[str], optimizers: Sequence[str] = (), rates: Mapping[str, float] | None = None
) -> tuple[Variant, ...]:
    """Every optimizer with every rule, in the order given.

    Args:
        asked: rules, each ``RULE[:PREDICTOR][:MODE]``, or ``all`` for every rule that is known.
        optimizers: names from :data:`OPTIMIZERS`; without any, the job's own.
        rates: optimizer to learning rate, where it is not to be the usual one.

    Raises:
        UsageError: a name is unknown, given twice, or a rate is none.
    """
    texts = [text for one in asked for text in ([rule.name for rule in rules()] if one == ALL else [one])]
    parsed = [_parsed(text) for text in texts]
    chosen: list[tuple[str, float | None]] = [(name, _rate(name, dict(rates or {}))) for name in optimizers]
    chosen = chosen or [(OWN, None)]
    for name in set(rates or {}) - set(optimizers):
        raise _refused(f"a learning rate for {name!r}", "rates of optimizers that are compared", "--optimizers")
    made = tuple(
        Variant(optimizer=name, rate=rate, rule=rule, predictor=predictor, backward=backward)
        for name, rate in chosen
        for rule, predictor, backward in parsed
    )
    _distinct(made)
    return made


def _parsed(text: str) -> tuple[str, str | None, str | None]:
    """Rule, predictor and mode; the latter two know each other by their names."""
    name, *rest = (part.strip() for part in text.split(":"))
    rule_named(name)
    predictors = [part for part in rest if part in PREDICTORS]
    modes = [part for part in rest if part in MODES]
    if len(predictors) > 1 or len(modes) > 1 or len(predictors) + len(modes) != len(rest):
        expected = f"RULE[:PREDICTOR][:MODE], of {', '.join(PREDICTORS)} and {', '.join(MODES)}"
        raise _refused(repr(text), expected, "--rules")
    return name, *(part[0] if part else None for part in (predictors, modes))  # type: ignore[return-value]


def _rate(name: str, rates: Mapping[str, float]) -> float:
    if name not in _FACTORIES:
        raise _refused(repr(name), f"any of {', '.join(OPTIMIZERS)}", "--optimizers")
    rate = rates.get(name, _FACTORIES[name][1])
    if not (math.isfinite(rate) and rate > 0):
        raise _refused(f"{name}={rate}", "a learning rate above zero", "--lr")
    return rate


def _distinct(made: Sequence[Variant]) -> None:
    names = [variant.name for variant in made]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not made:
        raise _refused(f"{twice[0]} twice" if twice else "none", "one rule at least, each once", "--rules")


def pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    """``NAME=VALUE`` of an option that can be given several times, or once with commas.

    Raises:
        UsageError: there is no ``=``, or a name comes twice.
    """
    found: dict[str, str] = {}
    for part in (one.strip() for text in texts for one in text.split(",") if one.strip()):
        match = re.fullmatch(r"([^=]+)=([^=]+)", part)
        if match is None or match[1] in found:
            raise _refused(repr(part), "NAME=VALUE, each name once", option)
        found[match[1].strip()] = match[2].strip()
    return found


def numbers(texts: Sequence[str], option: str) -> dict[str, float]:
    """As :func:`pairs`, with numbers for values.

    Raises:
        UsageError: a value is no finite number.
    """
    found = {}
    for name, text in pairs(texts, option).items():
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = math.nan
        if not math.isfinite(found[name]):
            raise _refused(f"{name}={text}", "NAME=NUMBER", option)
    return found


def _refused(got: str, expected: str, option: str) -> UsageError:
    return UsageError(f"{option} of the comparison", got=got, expected=expected, remedy=f"Correct {option}.")
