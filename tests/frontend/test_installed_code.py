"""A walk over reachable state visits what is near in installed packages, and all that the user's code holds."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from roundelay.reach.installed_code import is_installed
from roundelay.reach.reachable_state import MOST_INSTALLED, ReachableState
from tests.programs.table import Body

NAME = "large_library_of_tests"

LIBRARY = """
import functools

REGISTRY, SETTINGS = {}, {}

class Meter:
    made = [0]

    def __init__(self):
        self.total, self.seen = 0, []

    def update(self, value):
        self.total += 1
        self.seen.append(value)

def counted(function):
    @functools.wraps(function)
    def wrapper(*args):
        SETTINGS["called"] = True
        return function(*args)
    return wrapper

for k in range(9_000):
    REGISTRY[str(k)] = Meter()
    SETTINGS[str(k)] = {"a": [k], "b": {"c": [k]}}

CALLS = 0

def count():
    global CALLS
    CALLS += 1

def create(name):
    SETTINGS["made"] = name
    Meter.made.append(1)
    return REGISTRY[name]
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An installed package with tens of thousands of objects."""
    folder = tmp_path / "lib" / "site-packages"
    (folder / NAME).mkdir(parents=True)
    (folder / NAME / "__init__.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME)


def changed(roots: Any, call: Any) -> list[str]:
    """The paths of the slots that a call changes."""
    state = ReachableState([("it", roots)])
    call()
    return [change.slot.path for change in state.changes()]


def test_a_large_library_is_entered_as_far_as_what_is_near(library: ModuleType) -> None:
    create, kept = library.create, {"calls": 0}

    def helper(name: str) -> Any:
        kept["calls"] += 1
        return create(name)

    def loss(outputs: Any, batch: Any) -> Any:
        return helper("1") if batch is None else outputs.mean()

    state = ReachableState([("loss", loss)])
    visited = len(state._holders)
    assert visited < MOST_INSTALLED + 50
    assert changed(loss, lambda: loss(None, None)) == ["kept['calls']", "SETTINGS['made']"]


def test_state_that_a_library_keeps_is_found(library: ModuleType) -> None:
    def loss() -> None:
        library.Meter.made.append(1)
        library.count()

    direct, count = library.Meter, library.count
    assert changed(lambda: direct.made.append(1), lambda: loss()) == ["direct.made"]
    assert changed(lambda: count(), lambda: loss()) == ["CALLS"]


def test_state_of_a_librarys_object_that_the_code_holds_is_found(library: ModuleType) -> None:
    meter = library.Meter()

    def loss(value: Any) -> None:
        meter.update(value)

    assert changed(loss, lambda: loss(1)) == ["meter.total", "meter.seen"]
    state = ReachableState([("loss", loss)])
    loss(2)
    read = state.first_read(state.changes())
    assert read is not None
    assert read.slot.path == "meter.total"
    state.restore()
    assert (meter.total, meter.seen) == (1, [1])


def test_a_function_that_a_library_decorates_is_entered(library: ModuleType) -> None:
    calls = [0]

    @library.counted  # type: ignore[untyped-decorator]
    def loss(value: int) -> int:
        calls[0] += 1
        return value

    assert changed(loss, lambda: loss(1)) == ["calls", "SETTINGS['called']"]


def test_a_module_of_a_library_is_entered_as_far_as_its_own_attributes(library: ModuleType) -> None:
    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = getattr(self, "count", 0) + 1
            return x

    Counting.__module__ = NAME
    model = nn.Sequential(Counting())
    assert changed(model, lambda: model(torch.ones(1))) == ["it.0.count"]


def test_what_is_installed_is_told_by_its_file(library: ModuleType) -> None:
    assert all(map(is_installed, (library.create, library.Meter, json.dumps, json.JSONEncoder, pytest.raises)))
    assert not any(map(is_installed, (changed, Body, ReachableState, lambda: None)))
