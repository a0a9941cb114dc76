"""What README and documents print as code and commands runs as it is printed, page by page, in an empty folder.

A fenced block says what it is: ``python`` runs, or is a file if its first line is ``# NAME.py``; ``sh`` is typed into a
shell; in ``console`` a line after ``$`` is typed, and what stands below must come out. A block that says nothing is a
drawing. Blocks of one page follow one another in one folder, as a person meets them. What joins a run that another
machine hosts is typed in a folder of its own, with the invitation that the host has printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

from roundelay.cli.app import app
from tests.test_docs import CODE, PAGES, ROOT, prose

READ = [ROOT / "README.md", *PAGES]
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
FILE = re.compile(r"# (\w+\.py)\n")
KINDS = ("python", "sh", "console", "")
#: first words of a line that somebody would type, or of one of Python
TYPED = re.compile(
    r"^(\$|\S*(make|pip|python3?|torchrun|roundelay(?! action trace)|cp|source|import|from(?! \d)|def)) ", re.MULTILINE
)

LIMIT_S = 250.0
"""Seconds that a block may take on a loaded machine."""

EXEMPT = {
    "make train": "makes an environment from a package index, trains for minutes and runs every test",
}
"""How a block begins that is not run, and why."""


#: a line that hosts a run, and one that joins it from another machine
HOSTED = re.compile(r"^(roundelay host .*)$", re.MULTILINE)
JOINED = re.compile(r"^(roundelay join) INVITATION\b.*$", re.MULTILINE)
HOSTS = r"""{{ \1
}} 2> host.log &
running=($!)
until test "$(grep -c 'roundelay join' host.log)" = {}
do kill -0 $running || {{ cat host.log; exit 1; }}; sleep 0.1; done
printed=($(grep -o 'roundelay-1-[a-z2-7]*' host.log))"""
JOINS = r"""(mkdir there-{0} && cd there-{0} && {1} ${{printed[{0}]}} && test -z "$(ls)") &
running+=($!)"""
ALL_END = """
for one in ${running[@]}; do wait $one || { cat host.log; exit 1; }; done"""


def on_several_machines(typed: str) -> str:
    """What is typed where a run is hosted, and on the machines that join it, as typed into one shell."""
    joined = list(JOINED.finditer(typed))
    for number, line in reversed(list(enumerate(joined))):
        ends = ALL_END if line is joined[-1] else ""
        typed = typed[: line.start()] + JOINS.format(number, line[1]) + ends + typed[line.end() :]
    return HOSTED.sub(HOSTS.format(len(joined)), typed)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, what it says it is, and its text."""

    page: Path
    kind: str
    text: str

    @property
    def file(self) -> str:
        """The file that it is, or nothing."""
        found = FILE.match(self.text) if self.kind == "python" else None
        return found[1] if found else ""

    @property
    def typed(self) -> str:
        """What is typed into a shell."""
        if self.kind == "sh":
            return self.text
        return "".join(re.findall(r"^\$ ((?:.*\\\n)*.*\n)", self.text, re.MULTILINE)) if self.kind == "console" else ""

    @property
    def comes_out(self) -> list[str]:
        """Lines that a console shows."""
        shown = re.sub(r"^\$ (?:.*\\\n)*.*\n", "", self.text, flags=re.MULTILINE) if self.kind == "console" else ""
        return [line.rstrip() for line in shown.splitlines() if line.strip()]

    @property
    def exempt(self) -> list[str]:
        """Beginnings in :data:`EXEMPT` that are its own."""
        return [begins for begins in EXEMPT if self.typed.startswith(begins)]


def blocks(text: str, page: Path = ROOT / "README.md") -> list[Block]:
    """The fenced blocks of a page."""
    return [Block(page, kind.strip(), body) for kind, body in FENCE.findall(text)]


ALL = [block for page in READ for block in blocks(page.read_text(encoding="utf-8"), page)]


def unclear(block: Block) -> bool:
    """Whether a block is of an unknown kind, or looks like something to run and does not say so."""
    return block.kind not in KINDS or (not block.kind and bool(TYPED.search(block.text)))


def run(what: list[str], folder: Path, bin_folder: Path) -> str:
    """What comes out on both streams."""
    known = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "ROUNDELAY_RUNS": ""}
    env = known | {"PATH": os.pathsep.join([str(bin_folder), str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(
        what, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S
    )
    assert done.returncode == 0, f"{what[-1]}\n{done.stdout}"
    return done.stdout


def in_order(lines: list[str], told: str) -> Iterator[str]:
    """The lines that do not come out after those before them."""
    left = iter([line.rstrip() for line in told.splitlines()])
    return (line for line in lines if line not in left)


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the command lies that an installation would have."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "roundelay"
    command.write_text(f"#!{sys.executable}\nfrom roundelay.cli import main\nmain()\n")
    command.chmod(0o755)
    return folder


@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    "page", sorted({block.page for block in ALL if block.kind}), ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_what_a_page_prints_runs_as_it_is_printed(page: Path, tmp_path: Path, bin_folder: Path) -> None:
    of_page = [block for block in ALL if block.page == page and block.kind and not block.exempt]
    for block, behind in ((block, of_page[i + 1 :]) for i, block in enumerate(of_page)):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
            assert any(block.file in other.typed for other in behind), f"nobody runs {block.file}"
        elif block.kind == "python":
            run([sys.executable, "-W", "error", "-c", block.text], tmp_path, bin_folder)
        else:
            told = run(["bash", "-euo", "pipefail", "-c", on_several_machines(block.typed)], tmp_path, bin_folder)
            assert list(in_order(block.comes_out, told)) == [], told


def test_every_block_says_what_it_is() -> None:
    assert [block.text for block in ALL if unclear(block)] == []


def test_few_blocks_are_exempt_and_each_is_there() -> None:
    assert len(EXEMPT) <= 5
    assert sorted(begins for block in ALL for begins in block.exempt) == sorted(EXEMPT)


def misspelt(text: str) -> list[str]:
    """Commands of ours in backticks, within the text or in what is typed, with an option that there is not."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    typed = [line for block in blocks(text) for line in block.typed.replace("\\\n", " ").splitlines()]
    wrong = []
    for code in [*CODE.findall(prose(text)), *typed]:
        found = re.search(r"\broundelay ([a-z]+)\b(.*)", code)
        if found is None:
            continue
        known = {o for p in getattr(commands.get(found[1]), "params", []) for o in (*p.opts, *p.secondary_opts)}
        if found[1] not in commands or set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", found[2])) - known - {"--help"}:
            wrong.append(code)
    return wrong


@pytest.mark.parametrize("page", READ, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_within_a_text_have_options_that_there_are(page: Path) -> None:
    assert misspelt(page.read_text(encoding="utf-8")) == []


SAMPLE = """
```python
# a.py
x = 1
```
```python
print(1)
```
```sh
roundelay train a.py
```
```console
$ roundelay plan a.py \\
    --workers 2
$ echo b
one

two
```
```
roundelay train a.py
```
```rust
fn main() {}
```
```
stage 0 | F0
```
"""


def test_blocks_are_told_apart() -> None:
    """Guards the guards."""
    found = blocks(SAMPLE)
    assert [block.file for block in found] == ["a.py", "", "", "", "", "", ""]
    assert [block.typed for block in found[2:4]] == [
        "roundelay train a.py\n",
        "roundelay plan a.py \\\n    --workers 2\necho b\n",
    ]
    assert found[3].comes_out == ["one", "two"]
    assert [unclear(block) for block in found] == [False, False, False, False, True, True, False]
    assert list(in_order(["one", "two"], "zero\none  \ntwo\n")) == []
    assert list(in_order(["one", "two"], "two\none\n")) == ["two"]
    assert misspelt("`roundelay train J.py --worker 2` `roundelay trian` `roundelay plan J.py -o x --workers 2`") == [
        "roundelay train J.py --worker 2",
        "roundelay trian",
    ]
