"""Fields that a text file has as texts (``stage:1.0``, ``S(0)``) and a program as values: parsed once, when it is read.

A value prints as the text that its parser takes. :mod:`msgspec` converts the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, make_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Number = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]

Parsers = Mapping[Any, Callable[[str], Any]]
"""From a type to the function that makes a value of it from a text."""

_T = TypeVar("_T")


def convert(table: Mapping[str, Any], kind: type[_T], parsers: Parsers) -> _T:
    """The value of a dataclass that a table of a text file says.

    Args:
        table: as :mod:`tomllib` reads it.
        kind: the dataclass; its fields, also those of rows, may be of types that stand there as texts.
        parsers: of these types.

    Raises:
        msgspec.ValidationError: a field is missing, or of a wrong type.
        PlanError: a parser refuses a text.
    """
    whole: Any = kind
    value: _T = _parsed(msgspec.convert(table, _with_texts(whole, frozenset(parsers))), whole, parsers)
    return value


@cache
def _with_texts(kind: Any, parsed: frozenset[Any]) -> Any:
    """A type with ``str`` in place of those that are parsed."""
    if kind in parsed:
        return str
    if hasattr(kind, "__dataclass_fields__"):
        texts = {name: _with_texts(hint, parsed) for name, hint in _hints(kind).items()}
        defaults = {one.name: one for one in fields(kind)}
        return make_dataclass(kind.__name__, [(name, of, defaults[name]) for name, of in texts.items()], kw_only=True)
    origin = get_origin(kind)
    if origin is None or origin is Annotated:
        return kind
    return origin[tuple(one if one is Ellipsis else _with_texts(one, parsed) for one in get_args(kind))]


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _parsed(value: Any, kind: Any, parsers: Parsers) -> Any:
    """The value of a type from one that has texts."""
    if kind in parsers:
        return parsers[kind](value)
    if hasattr(kind, "__dataclass_fields__"):
        return kind(**{name: _parsed(getattr(value, name), hint, parsers) for name, hint in _hints(kind).items()})
    inner = get_args(kind)
    if get_origin(kind) is tuple:
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple([_parsed(one, of, parsers) for one, of in zip(value, kinds, strict=True)])
    if get_origin(kind) is Mapping:
        return {name: _parsed(one, inner[1], parsers) for name, one in value.items()}
    return value


def toml_line(name: str, value: Any) -> str:
    """A field as a line of TOML; lists and tables stay on one line, and what TOML does not know is its text."""
    if isinstance(value, dict):
        inside = [toml_line(tomli_w.dumps({key: 0}).rpartition(" = ")[0], item) for key, item in value.items()]
        return f"{name} = {{ {', '.join(inside)} }}" if inside else f"{name} = {{}}"
    if isinstance(value, tuple):
        return f"{name} = [" + ", ".join(toml_line("", item).removeprefix(" = ") for item in value) + "]"
    value = value if isinstance(value, str | int | float) else str(value)
    return tomli_w.dumps({"x": value}).rstrip("\n").replace("x", name, 1)
