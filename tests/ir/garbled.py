"""What may happen to a text that a person edits: a line lost, given twice or moved, a word or a letter changed."""

from __future__ import annotations

from hypothesis import strategies as st

#: What is written where a word stood; much of it looks like what belongs there.
NOISE = st.sampled_from(
    [
        "",
        "g",
        "g+1",
        "g-1",
        "g+x",
        "0",
        "-1",
        "1.5",
        "9" * 5000,
        "2>1",
        "0,1",
        ",",
        "forward",
        "takes",
        "live",
        "[[",
        '"',
    ]
) | st.text(max_size=5)


@st.composite
def garbled(draw: st.DrawFn, text: str) -> str:
    """``text`` with one to three wounds."""
    for _ in range(draw(st.integers(1, 3))):
        lines = text.split("\n")
        at = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["delete", "duplicate", "move", "word", "drop word", "letter", "insert"]))
        words = lines[at].split(" ")
        place = draw(st.integers(0, len(words) - 1))
        letter = draw(st.integers(0, max(0, len(lines[at]) - 1)))
        if kind == "delete":
            del lines[at]
        elif kind == "duplicate":
            lines.insert(at, lines[at])
        elif kind == "move":
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(at))
        elif kind == "word":
            lines[at] = " ".join([*words[:place], draw(NOISE), *words[place + 1 :]])
        elif kind == "drop word":
            lines[at] = " ".join([*words[:place], *words[place + 1 :]])
        elif kind == "letter":
            lines[at] = lines[at][:letter] + draw(st.characters(codec="utf-8")) + lines[at][letter + 1 :]
        else:
            lines.insert(at, draw(NOISE))
        text = "\n".join(lines) or "\n"
    return text
