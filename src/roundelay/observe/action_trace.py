"""What a stage writes down of a run whose order was free: one letter for each action, and digests of its state.

::

    roundelay action trace 1
    stage 1 of 3
    plan 8c1f...          digest of the plan's text
    model 3a90...         fingerprint
    seed 0
    arithmetic 77e2...    digest of what a fixed probe computes
    from 0 0              the first micro-batch, and the updates before it

    FFFBFBFB
    = 256 1f3a...         digest of the state after so many letters
    end 512               all letters of a run that came to its end

What a broken-off run leaves is read up to its last whole line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from roundelay.errors import UsageError

EVERY = 256
"""Letters from one digest to the next."""

LETTERS = {"forward": "F", "backward": "B"}
"""Opcode to letter; an update belongs to its backward."""

_HEAD = {
    "stage": r"(\d{1,6}) of (\d{1,6})",
    "plan": r"([0-9a-f]{16})",
    "model": r"(\S{1,128})",
    "seed": r"(-?\d{1,20})",
    "arithmetic": r"([0-9a-f]{16})",
    "from": r"(\d{1,18}) (\d{1,18})",
}
_FIRST = "roundelay action trace 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHead:
    """Of what run a trace is.

    Args:
        stage: number of the stage.
        stages: how many there are.
        plan: digest of the plan's text.
        model: fingerprint of the model.
        seed: of the run.
        arithmetic: as of :func:`roundelay.observe.arithmetic.arithmetic`.
        first: the first micro-batch, and the updates before it.
    """

    stage: int
    stages: int
    plan: str
    model: str
    seed: int
    arithmetic: str
    first: tuple[int, int]

    def __str__(self) -> str:
        lines = [_FIRST, f"stage {self.stage} of {self.stages}", f"plan {self.plan}", f"model {self.model}"]
        lines += [f"seed {self.seed}", f"arithmetic {self.arithmetic}", f"from {self.first[0]} {self.first[1]}"]
        return "\n".join([*lines, "", ""])


@dataclass(frozen=True, slots=True)
class ActionTrace:
    """The trace of a stage.

    Args:
        head: of what run.
        letters: in order.
        digests: of the stage's state, by the number of letters before.
        ended: whether the run came to its end.
    """

    head: TraceHead
    letters: str
    digests: Mapping[int, str] = field(hash=False)
    ended: bool


def lines_of(letters: str, digests: Mapping[int, str], before: int) -> str:
    """What is written of further letters.

    Args:
        letters: of them.
        digests: by the number of letters before, in order.
        before: letters written already.
    """
    parts, at = [], before
    for count, found in digests.items():
        parts += [f"{letters[at - before : count - before]}\n"] if count > at else []
        parts.append(f"= {count} {found}\n")
        at = count
    rest = letters[at - before :]
    return "".join([*parts, f"{rest}\n" if rest else ""])


def end_line(letters: int) -> str:
    """The last line of a run that has come to its end."""
    return f"end {letters}\n"


def parse(text: str, name: str) -> ActionTrace:
    """The trace that was written as ``text``.

    Args:
        text: of the file.
        name: of the file, for errors.

    Raises:
        UsageError: naming the first line that no trace has there.
    """
    whole = text[: text.rfind("\n") + 1]
    head, _, body = whole.partition("\n\n")
    found = _head(head, name)
    letters: list[str] = []
    count, digests, ended = 0, dict[int, str](), False
    for number, line in enumerate(body.splitlines(), head.count("\n") + 3):
        words = line.split()
        if re.fullmatch("[FB]+", line) and not ended:
            letters.append(line)
            count += len(line)
        elif re.fullmatch(r"= \d{1,18} [0-9a-f]{16}", line) and int(words[1]) == count and not ended:
            digests[count] = words[2]
        elif line == end_line(count).strip() and not ended:
            ended = True
        else:
            raise _no_trace(name, number, line)
    return ActionTrace(found, "".join(letters), digests, ended)


def _head(text: str, name: str) -> TraceHead:
    first, *lines = text.split("\n")
    if first != _FIRST:
        raise _no_trace(name, 1, first)
    words: dict[str, tuple[str, ...]] = {}
    for number, (line, (key, form)) in enumerate(zip([*lines, *[""] * len(_HEAD)], _HEAD.items(), strict=False), 2):
        match = re.fullmatch(f"{key} {form}", line)
        if match is None:
            raise _no_trace(name, number, line)
        words[key] = match.groups()
    if len(lines) != len(_HEAD):
        raise _no_trace(name, len(_HEAD) + 2, lines[-1])
    return TraceHead(
        stage=int(words["stage"][0]),
        stages=int(words["stage"][1]),
        plan=words["plan"][0],
        model=words["model"][0],
        seed=int(words["seed"][0]),
        arithmetic=words["arithmetic"][0],
        first=(int(words["from"][0]), int(words["from"][1])),
    )


def _no_trace(name: str, number: int, line: str) -> UsageError:
    return UsageError(
        f"line {number} of {name}",
        got=repr(line[:80]),
        expected="a line as a run whose order was free writes it",
        remedy="Give the folder of such a run, unchanged.",
    )
