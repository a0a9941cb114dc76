"""What the host of a run tells the machines that have joined when the run ends before its time: one line for each.

It is text from another machine, so what is shown of it is one line of printable characters.
"""

from __future__ import annotations

LOST, ENDED = "lost: ", "ended: "
"""What begins the words after a loss, whose peer and cause follow, and after an end in good order."""

MOST_CHARACTERS = 300


def lost_words(peer: str, cause: str) -> str:
    """The words after a loss."""
    return f"{LOST}{peer}: {one_line(cause)}"


def loss_told(words: str) -> tuple[str, str] | None:
    """The peer and the cause that words tell; None if they tell no loss."""
    if not words.startswith(LOST):
        return None
    peer, colon, cause = one_line(words.removeprefix(LOST)).partition(": ")
    return (peer, cause) if colon else None


def end_told(words: str) -> str | None:
    """How a run has ended in good order, as words tell it; None if they tell no such end."""
    return one_line(words.removeprefix(ENDED)) if words.startswith(ENDED) else None


def one_line(text: str) -> str:
    """A text as one line of printable characters, not too long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * MOST_CHARACTERS]).split())
    return line if len(line) <= MOST_CHARACTERS else line[: MOST_CHARACTERS - 4] + " ..."
