"""What a check tells while it runs: lines on stdout, which the runner reads even if the check is cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MARK = "@@first_look "


def _tell(**words: Any) -> None:
    print("\n" + MARK + json.dumps(words), flush=True)


def figure(name: str, value: float, unit: str) -> None:
    """A measurement."""
    _tell(kind="figure", name=name, value=value, unit=unit)


def note(words: str) -> None:
    """Words without a verdict."""
    _tell(kind="note", words=shortened(words))


def holds(words: str) -> None:
    """Something that must be so is so."""
    _tell(kind="holds", words=shortened(words))


def fails(words: str) -> None:
    """Something that must be so is not."""
    _tell(kind="fails", words=shortened(words))


def bar(holding: bool, words: str) -> None:
    """Something that must be so, and whether it is."""
    (holds if holding else fails)(words)


def skipped(why: str) -> None:
    """The check, or a part of it, cannot be made here."""
    _tell(kind="skipped", words=shortened(why))


def cases(total: int) -> None:
    """So many cases will be told of."""
    _tell(kind="cases", total=total)


def case(name: str, state: str, words: str = "", fidelity: str = "") -> None:
    """One case of many.

    Args:
        name: of the case.
        state: ``equal``, ``refused`` (as it must be), ``found`` (a fault on purpose), ``skipped``, or ``odd``.
        words: what is odd or why it is skipped.
        fidelity: whether the captured job was compared with plain PyTorch: ``equal``, or why not.
    """
    _tell(kind="case", name=name, state=state, words=shortened(words), fidelity=shortened(fidelity, 200))


def begins(what: str) -> None:
    """What is computed from now on; told of if the check is cut off in it."""
    _tell(kind="begins", words=what)


@contextmanager
def part(what: str) -> Iterator[None]:
    """A part of a check whose error does not end the others; it is told of as a failure."""
    begins(what)
    try:
        yield
    except Exception as error:
        fails(f"{what}: {in_words(error)}")


def in_words(error: BaseException) -> str:
    """An error and where it came from, in one line."""
    places, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__} {error} @ {' < '.join(reversed(places[-4:]))}"


def shortened(text: str, most: int = 900) -> str:
    """The text in one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[:most] + " ..."


def read(log: str) -> list[dict[str, Any]]:
    """Everything that a check has told, from what it printed; a line that was cut in its middle is left out."""
    told = []
    for line in log.splitlines():
        if line.startswith(MARK):
            try:
                told.append(json.loads(line[len(MARK) :]))
            except ValueError:
                continue
    return told
