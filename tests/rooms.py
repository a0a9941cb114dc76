"""Write the table of modules in docs/architecture.md from their docstrings: ``python -m tests.rooms``."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, PAGE = ROOT / "src" / "roundelay", ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: python -m tests.rooms -->\n", "<!-- end of rooms -->\n"
ROOMS = ("ir", "schedules", "frontend", "lower", "planner", "actor", "runtime", "reference")
ROOMS += ("transport", "checkpoint", "observe", "page", "api", "cli", "doctor")


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop and its markup."""
    text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    for role in (":class:", ":func:", ":mod:", ":data:", ":meth:"):
        text = text.replace(role, "")
    return " ".join(text.replace("``", "`").split()).removesuffix(".").replace("|", "\\|")


def table() -> str:
    """One row for each module: those at the top of the package, then folder by folder."""
    rows = ["| module | what it does |", "|---|---|"]
    for room in ("", *ROOMS):
        folder = PACKAGE / room
        if room:
            rows.append(f"| **`{room}/`** | **{summary(folder / '__init__.py')}** |")
        modules = sorted(path for path in folder.glob("*.py") if not path.name.startswith("__"))
        rows += [f"| `{path.relative_to(PACKAGE)}` | {summary(path)} |" for path in modules]
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """The page with today's table."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
