"""The documents, held against the tree: what they name exists, and what must be named is.

A reference is a path in backticks, with a name after two colons where one is meant: ``weight_prediction.py::predict``.
Paths that begin with ``src/``, ``tests/``, ``docs/`` or ``examples/`` are below the repository, all others below the
package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.rooms import rooms, with_table

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "roundelay"
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
#: pages whose links are held; what lies outside docs/ names files and commands in words of its own
LINKED = [*PAGES, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
PAPERS = sorted((DOCS / "papers").glob("*.md"))
#: how a paper is called where the source cites it
TITLES = {
    "autoddl": "AutoDDL",
    "cdp": "Cyclic Data Parallelism|CDP",
    "oneflow": "OneFlow",
    "pipeoptim": "PipeOptim",
    "ravnest": "Ravnest",
}

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"([\w.-]+/)*[\w-]+\.(py|md|toml|txt)|([\w.-]+/)+")
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
TOP = ("src/", "tests/", "docs/", "examples/")


def prose(text: str) -> str:
    """The text without what stands between fences."""
    return FENCE.sub("", text)


def references(text: str) -> Iterator[tuple[str, str]]:
    """(path, name) of every path in backticks; the name may be empty."""
    for code in CODE.findall(prose(text)):
        path, _, name = code.partition("::")
        if PATH.fullmatch(path):
            yield path, name


def place(path: str) -> Path:
    """Where a path of a page lies."""
    return ROOT / path if path.startswith(TOP) or (ROOT / path).is_file() else PACKAGE / path


@cache
def names(path: Path) -> frozenset[str]:
    """What a module defines: functions, classes with their members, and names that it or an instance is given."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + child.name)
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
                found.update(f"{prefix}{child.name}.{name}" for name in given(child))
            targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return frozenset(found)


def given(owner: ast.ClassDef) -> Iterator[str]:
    """Attributes that a class's methods give to ``self``."""
    for node in ast.walk(owner):
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr


def missing(text: str) -> list[str]:
    """References of a page that lead nowhere."""
    return [
        f"{path}::{name}" if name else path
        for path, name in references(text)
        if not place(path).exists() or (name and name not in names(place(path)))
    ]


def anchors(text: str) -> set[str]:
    """What a link's ``#`` may name: headings in lower case, words joined by dashes."""
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose(text)))
    return {heading.replace(" ", "-") for heading in kept}


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    wrong = []
    for link in LINK.findall(prose(page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"https?:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            wrong.append(link)
    return wrong


def section(page: Path, title: str) -> str:
    """What stands below a heading of the second level."""
    parts = page.read_text(encoding="utf-8").split(f"\n## {title}\n")
    assert len(parts) == 2, f"{page.relative_to(ROOT)} needs one section {title!r}"
    return parts[1].split("\n## ")[0]


def files(text: str) -> set[str]:
    """Source files that a text names."""
    return {path for path, _ in references(text) if path.endswith(".py") and not path.startswith(TOP)}


def by_name(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_path_and_name_of_a_page_exists(page: Path) -> None:
    assert missing(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_every_page_can_be_reached_from_the_index() -> None:
    seen, found = set(), [DOCS / "index.md"]
    while found:
        page = found.pop().resolve()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            links = LINK.findall(prose(page.read_text(encoding="utf-8")))
            found += [page.parent / link.partition("#")[0] for link in links if not re.match(r"https?:|#", link)]
    assert [by_name(page) for page in PAGES if page not in seen] == []


def test_every_folder_has_its_row_in_the_architecture() -> None:
    """Its modules are named in it."""
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("**/__init__.py")} - {"."}
    assert sorted(rooms()) == sorted(folders)


def test_the_table_of_modules_says_what_their_docstrings_say() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert page == with_table(page), "run `python -m tests.rooms`"


@pytest.mark.parametrize("page", PAPERS, ids=by_name)
def test_every_row_of_a_paper_names_its_function_and_its_test(page: Path) -> None:
    rows = re.findall(r"^\|(?!-)(.+)\|$", section(page, "Built"), re.MULTILINE)[1:]
    assert rows
    for row in rows:
        _, function, test = row.split(" | ")
        assert list(references(function)) or function.strip().startswith("the same"), row
        assert [name for path, name in references(test) if path.startswith("tests/") and name.startswith("test_")], row


@pytest.mark.parametrize("page", PAPERS, ids=by_name)
def test_a_paper_s_two_tables_name_the_same_files(page: Path) -> None:
    """From the paper to the code, and from the code back."""
    assert files(section(page, "Built")) == files(section(page, "From the code back"))


@pytest.mark.parametrize("page", PAPERS, ids=by_name)
def test_every_test_of_a_paper_is_named_on_its_page(page: Path) -> None:
    """``tests/papers/test_PAPER_*.py`` holds what the paper states."""
    named = set(references(page.read_text(encoding="utf-8")))
    paths = sorted((ROOT / "tests" / "papers").glob(f"test_{page.stem}*.py"))
    tests = [(path.relative_to(ROOT).as_posix(), name) for path in paths for name in names(path)]
    assert [test for test in tests if test[1].startswith("test_") and test not in named] == []


@pytest.mark.parametrize("page", PAPERS, ids=by_name)
def test_a_module_that_cites_a_paper_is_named_on_its_page(page: Path) -> None:
    title = re.compile(rf"\b({TITLES[page.stem]})\b")
    citing = [path for path in sorted(PACKAGE.rglob("*.py")) if title.search(path.read_text(encoding="utf-8"))]
    named = files(section(page, "From the code back"))
    assert [path.name for path in citing if path.relative_to(PACKAGE).as_posix() not in named] == []


def test_every_paper_says_what_it_lacks() -> None:
    assert {page.stem for page in PAPERS} == set(TITLES)
    for page in PAPERS:
        assert section(page, "Not built yet").strip().startswith("- ")


BAD = [
    "weight_prediction.py::predicted",
    "tests/test_weight_prediction.py::test_nothing",
    "src/roundelay/weigth.py",
    "tests/nowhere/",
]
GOOD = [
    "weight_prediction.py::LastStep.rate",
    "actor/machine.py::Machine.credits",
    "tests/papers/",
    "pyproject.toml",
    "W[t].py",
]


def test_a_reference_that_leads_nowhere_is_seen_and_no_other(tmp_path: Path) -> None:
    """Guards the guards."""
    assert missing(" ".join(f"`{code}`" for code in BAD + GOOD)) == BAD
    page = tmp_path / "page.md"
    page.write_text("# A b\n[x](#a-b) [y](page.md#a-b) [z](#c) [n](none.md)\n```\n[f](none.md)\n```\n")
    assert broken(page) == ["#c", "none.md"]
