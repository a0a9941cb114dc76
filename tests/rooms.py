"""Write the floors and the modules in docs/architecture.md, and print every one with its docstring's first sentence."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, PAGE = ROOT / "src" / "roundelay", ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: python -m tests.rooms -->\n", "<!-- end of rooms -->\n"


def floors() -> list[list[str]]:
    """The rooms of each floor, from the top: what the import contract of pyproject.toml says."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (one["layers"] for one in contracts if one["id"] == "layers")
    return [[name.strip(" ()") for name in layer.split("|")] for layer in layers]


def rooms() -> list[str]:
    """The folders of modules, from the top floor down, each before those in it."""
    outer = [name for floor in floors() for name in floor if (PACKAGE / name).is_dir()]
    return [
        path.parent.relative_to(PACKAGE).as_posix()
        for name in outer
        for path in sorted((PACKAGE / name).rglob("__init__.py"))
    ]


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop and its markup."""
    text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    for role in (":class:", ":func:", ":mod:", ":data:", ":meth:"):
        text = text.replace(role, "")
    return " ".join(text.replace("``", "`").split()).removesuffix(".").replace("|", "\\|")


def modules(room: str) -> list[Path]:
    """The modules of a folder of the package; of the package itself if it has no name."""
    return sorted(path for path in (PACKAGE / room).glob("*.py") if not path.name.startswith("__"))


def table() -> str:
    """One row for each folder: what it does, and its modules."""
    rows = ["| folder | what it does | modules |", "|---|---|---|"]
    for room in ("", *rooms()):
        name = f"`{room}/`" if room else "the package itself"
        does = summary(PACKAGE / room / "__init__.py")
        rows.append(f"| **{name}** | {does} | {', '.join(path.stem for path in modules(room))} |")
    return "\n".join(rows) + "\n"


def stairs() -> str:
    """The floors in words."""
    lines = [f"{k}. {' | '.join(f'`{name}`' for name in floor)}" for k, floor in enumerate(floors(), 1)]
    return "\n".join(lines) + "\n\n"


def listing() -> str:
    """Every module with its own sentence."""
    paths = [path for room in ("", *rooms()) for path in modules(room)]
    return "\n".join(f"{path.relative_to(PACKAGE)}: {summary(path)}" for path in paths)


def with_table(page: str) -> str:
    """The page with today's table."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + stairs() + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(listing() + "\n")
