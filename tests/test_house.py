"""The rules of the house that no linter knows, held against the source tree itself.

Each rule is a function from a parsed module to the nodes that break it. A second test plants a breach of every rule,
so that a rule that has gone blind fails too.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen, run
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import nothing_left_behind

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "roundelay"
MODULES = sorted(PACKAGE.rglob("*.py"))

UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
# Collectives that pickle on one side and unpickle on the other.
OBJECT_COLLECTIVE = re.compile(r"(all_gather|gather)_object|(broadcast|scatter|send|recv)_object_list")
EVALUATORS = {"eval", "exec", "compile", "__import__", "importlib.import_module", "runpy.run_path", "runpy.run_module"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
# What lies beside the package in the repository, and what works there alone.
OUTSIDE = re.compile(r"\b(examples|benchmarks|docs|tests|requirements)/|\.venv\b|`make |\bREADME|\bCHANGELOG")
RANK = re.compile(r"(.+_)?rank|is_(first|last)(_stage|_rank)?|is_main_process|get_rank")


def imported(node: ast.AST) -> Iterator[str]:
    """Dotted names that an import statement brings in, with the module that they come from."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def named(node: ast.AST) -> str:
    """``a.b.c`` for a name or a chain of attributes, empty for anything else."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def last(node: ast.AST) -> str:
    """The last part of a name: ``c`` of ``a.b.c``."""
    return named(node).rpartition(".")[2]


def unpickling(tree: ast.Module) -> Iterator[ast.AST]:
    """Imports of picklers, ``torch.load`` and collectives over objects."""
    for node in ast.walk(tree):
        names = list(imported(node)) or [named(node)]
        if (
            any(name.split(".")[0] in UNPICKLERS for name in imported(node))
            or any(name in {"torch.load", "torch.serialization.load"} for name in names)
            or any(OBJECT_COLLECTIVE.fullmatch(name.rpartition(".")[2]) for name in names)
        ):
            yield node


def evaluating(tree: ast.Module) -> Iterator[ast.AST]:
    """Calls that make code of a text or of bytes, and imports by a name that is computed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and named(node.func) in EVALUATORS:
            yield node


def environment(tree: ast.Module) -> Iterator[ast.AST]:
    """Every road to an environment variable."""
    roads = {f"os.{name}" for name in ENVIRONMENT}
    for node in ast.walk(tree):
        if named(node) in roads or roads & set(imported(node)):
            yield node


def printing(tree: ast.Module) -> Iterator[ast.AST]:
    """Calls of ``print``."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and named(node.func) == "print")


def undocumented(tree: ast.Module) -> Iterator[ast.AST]:
    """The module itself, where it has no docstring."""
    if not (ast.get_docstring(tree) or "").strip():
        yield tree


def rank_branches(tree: ast.Module) -> Iterator[ast.AST]:
    """Choices that depend on who runs the code; such a choice belongs in the Program."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            choices: list[ast.expr] = [node.test]
        elif isinstance(node, ast.comprehension):
            choices = node.ifs
        elif isinstance(node, ast.Match):
            choices = [node.subject]
        else:
            continue
        if any(RANK.fullmatch(last(part)) for choice in choices for part in ast.walk(choice)):
            yield node


def deferred_imports(tree: ast.Module) -> Iterator[ast.AST]:
    """Imports of our own modules inside a function: a cycle in hiding."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for node in (inner for function in functions for inner in ast.walk(function)):
        if any(name.startswith((".", "roundelay.")) or name == "roundelay" for name in imported(node)):
            yield node


def beyond_the_package(tree: ast.Module) -> Iterator[ast.AST]:
    """Texts for people that name what no installed package holds; module and attribute docstrings are for readers."""
    for_readers = {id(node.value) for node in tree.body if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if OUTSIDE.search(text) and id(node) not in for_readers:
            yield node


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: what breaks it, where that is allowed, and examples of either kind.

    Args:
        breaches: yields the offending nodes of a module.
        except_in: paths below ``src/roundelay`` where the rule does not hold; a folder ends in ``/``.
        bad: sources that break the rule.
        good: sources that come close and do not.
    """

    breaches: Callable[[ast.Module], Iterator[ast.AST]]
    bad: tuple[str, ...]
    good: tuple[str, ...]
    except_in: tuple[str, ...] = ()


RULES = {
    "bytes are never unpickled": Rule(
        unpickling,
        bad=(
            "import pickle",
            "from cloudpickle import loads",
            "x = torch.load(path, weights_only=True)",
            "from torch import load",
            "dist.broadcast_object_list(x)",
            "from torch.distributed import all_gather_object",
        ),
        good=("from safetensors.torch import load", "json.load(f)", "dist.broadcast(x, 0)", "'pickle'"),
    ),
    "no text becomes code, and only names of the house's own are imported by name": Rule(
        evaluating,
        except_in=(
            "__init__.py",
            "api/__init__.py",
            "cli/__init__.py",
            "cli/loading.py",
            "doctor/",
            "optional_packages.py",
        ),
        bad=("eval(text)", "exec(data, {})", "compile(text, 'x', 'exec')", "importlib.import_module(name)"),
        good=("re.compile('x')", "torch.compile(model)", "model.eval()", "self.exec()"),
    ),
    "the environment is read in env.py only": Rule(
        environment,
        except_in=("env.py",),
        bad=("os.environ['A']", "x = os.getenv('A')", "from os import environ as e", "os.environ.copy()"),
        good=("import os", "self.environ", "os.getpid()"),
    ),
    "only the command line prints": Rule(
        printing,
        except_in=("cli.py", "cli/"),
        bad=("print('x')", "def f():\n    return [print(x) for x in y]"),
        good=("console.print('x')", "'print(x)'", "pprint(x)"),
    ),
    "every module says what it is for": Rule(
        undocumented,
        bad=("", "import os", "x = 1\n'''late'''", "'''  '''"),
        good=("'''What it is for.'''",),
    ),
    "nothing branches on a rank outside lower and the worker": Rule(
        rank_branches,
        except_in=("lower/", "runtime/worker.py"),
        bad=(
            "if rank == 0: pass",
            "while 0 < self.local_rank: pass",
            "x = 1 if dist.get_rank() == 0 else 2",
            "if not is_last_stage: pass",
            "[x for x in y if x.rank != rank]",
            "match rank:\n    case 0: pass",
        ),
        good=("send(rank)", "if frank: pass", "if ranks: pass", "if ranking == 1: pass", "x = rank + 1"),
    ),
    "texts for people name nothing that an installed package lacks": Rule(
        beyond_the_package,
        bad=(
            "f(remedy='See examples/char_gpt.py.')",
            "x = f'{name}: run `make venv`'",
            "def f():\n    '''See docs/options.md.'''",
            "'''A module.'''\nhelp = '.venv/bin/roundelay, as README.md says'",
        ),
        good=(
            "'''Held by tests/test_house.py.'''",
            "X = 7\n'''As benchmarks/depth found.'''",
            "f(remedy='See `roundelay train --help`.')",
            "x = 'make the batches alike'",
        ),
    ),
    "our own modules are imported at the top": Rule(
        deferred_imports,
        bad=("def f():\n    from roundelay.ir import graph", "async def f():\n    from . import graph"),
        good=("from roundelay.ir import graph", "def f():\n    import json", "def f():\n    import roundelayed"),
    ),
}


def sources(rule: Rule) -> list[Path]:
    """The modules for which a rule holds."""
    paths = ((path, path.relative_to(PACKAGE).as_posix()) for path in MODULES)
    excepted = tuple(place for place in rule.except_in if place.endswith("/"))
    return [path for path, place in paths if place not in rule.except_in and not place.startswith(excepted or ("\0",))]


@pytest.mark.parametrize("name", RULES)
def test_the_source_keeps_the_rule(name: str) -> None:
    """The message names each place, as an editor can open it."""
    rule = RULES[name]
    modules = sources(rule)
    assert modules, f"no source found below {PACKAGE}"
    breaches = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        for path in modules
        for node in rule.breaches(ast.parse(path.read_text(encoding="utf-8"), str(path)))
    ]
    assert not breaches, f"{name}; broken at {', '.join(breaches)}"


@pytest.mark.parametrize("name", RULES)
def test_the_rule_sees_its_breach_and_nothing_else(name: str) -> None:
    """Guards the guards."""
    rule = RULES[name]
    assert [source for source in rule.bad if not list(rule.breaches(ast.parse(source)))] == []
    assert [source for source in rule.good if list(rule.breaches(ast.parse(source)))] == []


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.except_in])
def test_an_exception_is_as_narrow_as_it_reads(name: str) -> None:
    """``cli.py`` excepts neither ``ir/cli.py`` nor ``client.py``: what a rule skips lies in a place that it names."""
    rule = RULES[name]
    skipped = {path.relative_to(PACKAGE).as_posix() for path in set(MODULES) - set(sources(rule))}
    assert all(path in rule.except_in or f"{path.split('/')[0]}/" in rule.except_in for path in skipped)


def test_every_folder_of_modules_is_a_package() -> None:
    """The import contracts do not see a folder that has no ``__init__.py``: whatever it imports would pass."""
    assert [path.name for path in {path.parent for path in MODULES} if not (path / "__init__.py").is_file()] == []


def test_what_plans_and_simulates_imports_where_there_is_no_torch() -> None:
    """The contract's other half: importing ``roundelay.ir`` runs ``roundelay/__init__.py`` first, unseen by it."""
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    (expressions,) = (contract["source_modules"] for contract in contracts if contract["id"] == "torch-free")
    free = tuple(expression.removeprefix("*.") for expression in expressions)
    parts = [path.relative_to(PACKAGE).with_suffix("").parts for path in MODULES]
    modules = [".".join(("roundelay", *part)).removesuffix(".__init__") for part in parts if part[0] in free]
    code = "import importlib, sys; sys.modules['torch'] = None; [importlib.import_module(m) for m in sys.argv[1:]]"
    result = run([sys.executable, "-c", code, *modules], capture_output=True, text=True, timeout=60, check=False)
    assert modules
    assert result.returncode == 0, result.stderr


def pyproject() -> dict[str, Any]:
    """``pyproject.toml``, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> dict[str, str]:
    """The lock file: canonical package name to exact version."""
    lines = (ROOT / "requirements" / "lock.txt").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line and not line.startswith("#")]
    parts = [re.fullmatch(r"([\w.-]+)==([\w.]+)", row) for row in rows]
    assert all(parts), (
        f"not an exact and portable pin: {[row for row, part in zip(rows, parts, strict=True) if not part]}"
    )
    return {canonicalize_name(part[1]): part[2] for part in parts if part}


def test_every_declared_dependency_is_pinned_within_its_range() -> None:
    """``pyproject.toml`` says what would do, the lock what is taken; +cpu in it would bind it to one index."""
    project = pyproject()
    declared = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
    ]
    locked = pins()
    wrong = [
        f"{requirement}: locked {locked.get(canonicalize_name(requirement.name))}"
        for requirement in map(Requirement, declared)
        if not requirement.specifier.contains(locked.get(canonicalize_name(requirement.name), "0"))
        or canonicalize_name(requirement.name) not in locked
    ]
    assert wrong == []


def forget(start: Callable[[], object]) -> None:
    """A test that starts something and ends."""
    with nothing_left_behind(grace=0.1):
        start()


@pytest.mark.parametrize("killed", [False, True], ids=["live", "unreaped"])
def test_a_process_left_behind_fails_its_test(killed: bool) -> None:
    """A live child, and one that ended but was never waited for."""
    with contextlib.ExitStack() as stack:

        def start() -> None:
            child = stack.enter_context(Popen([sys.executable, "-c", "input()"], stdin=PIPE))
            stack.callback(child.kill)
            if killed:
                child.kill()

        with pytest.raises(pytest.fail.Exception, match=r"left behind: process \d+"):
            forget(start)


def test_a_process_that_was_waited_for_is_not_left_behind() -> None:
    """Once reaped, a child is nobody's fault."""
    forget(lambda: Popen([sys.executable, "-c", ""]).wait())


def test_a_thread_left_behind_fails_its_test() -> None:
    """A daemon thread is let off: it cannot keep the interpreter from ending."""
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait, name=name, daemon=name == "daemon") for name in ("worker", "daemon")]
    with pytest.raises(pytest.fail.Exception, match="worker") as failure:
        forget(lambda: list(map(threading.Thread.start, threads)))
    stop.set()
    for thread in threads:
        thread.join()
    assert "daemon" not in str(failure.value)


def test_what_ends_within_its_grace_is_not_left_behind() -> None:
    """Ends are asynchronous: the check waits a little before it speaks."""
    with nothing_left_behind():
        threading.Timer(0.2, bool).start()
