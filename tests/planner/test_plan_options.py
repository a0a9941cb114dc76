"""The choices of a plan: one list for the command line and Python, kinds that are held, and what is given over what."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from typer.main import get_command

import roundelay
from roundelay.cli.app import app
from roundelay.errors import PlanError
from roundelay.planner.plan_options import (
    OF_A_RULE,
    AnyRuleKeywords,
    Choices,
    Keywords,
    descriptions,
    flag,
    from_keywords,
)


def test_python_s_keywords_are_the_choices() -> None:
    """With the same types: editors complete what the checks accept."""
    hints = get_type_hints(Choices)
    assert get_type_hints(Keywords) == hints
    assert get_type_hints(AnyRuleKeywords) == {name: hint for name, hint in hints.items() if name not in OF_A_RULE}


@pytest.mark.parametrize("function", [roundelay.plan, roundelay.train, roundelay.verify, roundelay.compare])
def test_a_function_shows_every_choice_that_it_takes(function: Any) -> None:
    without = OF_A_RULE if function is roundelay.compare else ()
    names = {one.name for one in fields(Choices)} - set(without)
    assert names <= signature(function).parameters.keys()
    assert not set(without) & signature(function).parameters.keys()


@pytest.mark.parametrize("command", ["plan", "train", "verify", "compare"])
def test_a_command_has_an_option_for_each_with_its_help(command: str) -> None:
    without = OF_A_RULE if command == "compare" else ()
    own = {one.name: one for one in get_command(app).commands[command].params}  # type: ignore[attr-defined]
    for name, choice in descriptions().items():
        if name not in without:
            assert (own[name].opts[0], own[name].help) == (choice.flag or flag(name), choice.help)


#: a value that each kind refuses
WRONG: dict[Any, Any] = {int: 1.5, float: "1", bool: 1, str: 3}


@pytest.mark.parametrize("name", [one.name for one in fields(Choices)])
def test_a_value_of_another_kind_is_refused_by_name(name: str) -> None:
    kinds = [kind for kind in get_args(get_type_hints(Choices)[name]) if kind is not NoneType]
    wrong = WRONG[kinds[0]] if len(kinds) == 1 else object()
    with pytest.raises(PlanError, match=rf"^{name}: got .*; expected .+\. Correct {name}\."):
        Choices(**{name: wrong}).check_kinds()
    Choices(**{name: None}).check_kinds()


def test_true_is_no_number() -> None:
    with pytest.raises(PlanError, match="workers: got True; expected a whole number"):
        Choices(workers=True).check_kinds()
    Choices(ema=1, memory_limit=5, recompute=("a",), cuts=[["a"]]).check_kinds()


def test_what_is_given_stands_over_what_is_not() -> None:
    over = Choices(workers=2, rule="gpipe").over(Choices(workers=3, clip="stage:1", zero=0))
    assert over.given() == {"workers": 2, "rule": "gpipe", "clip": "stage:1", "zero": 0}
    assert over.names() == {"workers", "rule", "clip", "zero"}


def test_an_unknown_keyword_is_told_with_those_that_it_is_near_to() -> None:
    def plan(*, seed: int = 0, **choices: Any) -> Choices:
        return from_keywords(plan, choices, ("rule",))

    assert plan(workers=2) == Choices(workers=2)
    with pytest.raises(
        TypeError, match=r"plan\(\) got an unexpected keyword argument 'worker'; did you mean 'workers'"
    ):
        plan(worker=2)
    with pytest.raises(TypeError, match=r"'rule'; it knows seed, workers, .*, backward"):
        plan(rule="1f1b")
