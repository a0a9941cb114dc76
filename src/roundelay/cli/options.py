"""Options that several commands share. No torch is needed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, final, get_args, get_origin, get_type_hints

import typer

from roundelay.cli.changed_by_job import PathResolver
from roundelay.cli.signals import Grace
from roundelay.env import launched
from roundelay.errors import UsageError
from roundelay.planner.plan_options import OF_A_RULE, Choice, Choices

_T = TypeVar("_T")

JobFile = Annotated[
    Path, typer.Argument(help="Python file that defines `def job(seed) -> roundelay.Job`.", metavar="JOB.py")
]
Steps = Annotated[
    int | None,
    typer.Option(
        help="Updates to make (with --from: more updates). [default: the rest of an interrupted run; the job's own "
        "number; one epoch]"
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Train up to this many epochs in all, instead of --steps.")]
Seed = Annotated[int, typer.Option(help="Seed of model, data order and all random numbers.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Run this plan unchanged.")]
Resume = Annotated[Path | None, typer.Option("--from", help="Continue from this checkpoint or run folder.")]
Check = Annotated[
    str | None,
    typer.Option(
        help="Before training, compare the captured job with plain PyTorch: full, over two updates; quick, by what "
        "capture has detected; off. [default: full where it takes less than 5 s and a quarter of the free memory; else "
        "quick]",
        metavar="full|quick|off",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """How a command shows the options of a group.

    Args:
        without: fields that are no options of it.
        hidden: options that it refuses, and says why: its help leaves them out.
        helps: what its help says of others, where that is not true of every command.
    """

    without: Collection[str] = ()
    hidden: Collection[str] = ()
    helps: Mapping[str, str] = field(default_factory=dict)


AnyRule = Annotated[Choices, Shown(without=OF_A_RULE)]
"""Choices without these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of ``train`` other than its plan's choices, one for each field."""

    steps: Steps = None
    epochs: Epochs = None
    seed: Seed = 0
    plan_file: PlanFile = None
    resume: Resume = None
    out: Annotated[Path | None, typer.Option(help="The run's folder. [default: runs/TIME]")] = None
    baseline: Annotated[
        bool, typer.Option(help="First measure plain PyTorch's speed for a few seconds, for comparison.")
    ] = False
    restarts: Annotated[
        int, typer.Option(help="How often a run that fails is restarted from its last checkpoint.", min=0)
    ] = 0
    checkpoint_every: Annotated[
        int,
        typer.Option(
            help="Also write a checkpoint every S updates, without draining the stages. [default: only after epochs]",
            min=0,
            metavar="S",
            show_default=False,
        ),
    ] = 0
    grace_s: Annotated[
        float,
        typer.Option(
            help="Seconds for a last checkpoint after SIGTERM; a second signal ends the run at once. 0: none.", min=0
        ),
    ] = 20.0
    usr1: Annotated[
        bool, typer.Option("--usr1", help="Handle SIGUSR1 like SIGTERM: Slurm sends it with --signal=USR1@60.")
    ] = False
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write curves for TensorBoard, in the run's folder.")
    ] = False
    check: Check = None
    verbose: Annotated[bool, typer.Option("--verbose", help="At the end also show time and memory by worker.")] = False

    @property
    def grace(self) -> Grace:
        """The signals that request a graceful end, and its time limit."""
        return Grace(self.grace_s, (signal.SIGTERM, signal.SIGUSR1) if self.usr1 else (signal.SIGTERM,))

    def resolved(self, paths: PathResolver) -> RunOptions:
        """The same options, if the job file has changed the current folder."""
        return replace(self, plan_file=paths.of(self.plan_file), resume=paths.of(self.resume), out=paths.of(self.out))


def expand_options(command: Callable[..., _T]) -> Callable[..., _T]:
    """Replace every parameter of a command whose type is a dataclass by one option for each of its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: _options(*_group(hint)) for name, hint in hints.items() if is_dataclass(_group(hint)[0])}
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        parameters += groups.get(parameter.name, [parameter.replace(kind=Parameter.KEYWORD_ONLY)])

    @wraps(command)
    def expanded(**given: Any) -> _T:
        together = {
            name: _group(hints[name])[0](**{each.name: given.pop(each.name) for each in options})
            for name, options in groups.items()
        }
        return command(**together, **given)

    expanded.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return expanded


def _group(hint: Any) -> tuple[Any, Shown]:
    """A type, and how its fields are shown as options."""
    return get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, Shown())


def _options(group: Any, shown: Shown) -> list[Parameter]:
    """One option for each field of a dataclass."""
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if each.default is MISSING else each.default,
            annotation=_option(each.name, hints[each.name], shown),
        )
        for each in fields(group)
        if each.name not in shown.without
    ]


def _option(name: str, hint: Any, shown: Shown) -> Any:
    """The option of a field; of a choice as it is told."""
    kind, described = get_args(hint)
    if not isinstance(described, Choice):
        return hint
    flags = [described.flag] if described.flag else []
    told, hidden = shown.helps.get(name, described.help), name in shown.hidden
    return Annotated[described.typed or kind, typer.Option(*flags, help=told, metavar=described.metavar, hidden=hidden)]


def exclusive(steps: int | None, epochs: int | None) -> None:
    """Refuse ``--steps`` together with ``--epochs``.

    Raises:
        UsageError: both are given.
    """
    if steps is not None and epochs is not None:
        raise UsageError("--steps and --epochs", got="both", expected="one of them", remedy="Leave one of them out.")


def refuse_nccl(command: str, transport: str | None) -> None:
    """Refuse a command over nccl that no launcher has started, and that so runs in one process.

    Raises:
        UsageError: the transport is nccl.
    """
    if transport == "nccl" and launched() is None:
        raise UsageError(
            f"`roundelay {command}` over nccl",
            got="one process",
            expected="a transport between threads: nccl carries tensors between processes of a launcher's",
            remedy="Leave --transport out: the same plan computes the same bits over memory.",
        )


def refuse_launcher(command: str) -> None:
    """Refuse a command under a launcher, where several processes would do the same.

    Raises:
        UsageError: a launcher has started this process.
    """
    if launched() is not None:
        raise UsageError(
            f"`roundelay {command}` under a launcher",
            got="one of several processes that would all do the same",
            expected="the command by itself",
            remedy=f"Run `roundelay {command}` without the launcher; only `train`, `verify` and `calibrate` run under "
            "one.",
        )
