"""Options that several commands share, and what they make of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from roundelay.api import capture
from roundelay.api.compile_stages import compile_stages, for_plan
from roundelay.api.plan_file import read_plan
from roundelay.api.planning import Planned, fitted, plan_with_reasons
from roundelay.api.recompute_choice import names_in
from roundelay.cli.debug_output import show_choices
from roundelay.cli.resume_options import plan_files, taken_over
from roundelay.cli.screen import announce, doing
from roundelay.env import first_on_host, launched
from roundelay.errors import ToldElsewhereError, UsageError
from roundelay.frontend import Captured
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rules
from roundelay.job import Job
from roundelay.runtime.device import named, present
from roundelay.runtime.forked_call import apart
from roundelay.runtime.launch import needs_launcher
from roundelay.runtime.loader_probe import DEADLINE_S
from roundelay.runtime.rendezvous import ProcessGroup

_T = TypeVar("_T")

JobFile = Annotated[
    Path, typer.Argument(help="Python file that defines `def job(seed) -> roundelay.Job`.", metavar="JOB.py")
]
Workers = Annotated[
    int | None,
    typer.Option(help="Number of workers, a stage each, or two by zb-v. [default: cores, at most 2]"),
]
_RULES = ", ".join(rule.name for rule in rules())
Rule = Annotated[
    str | None, typer.Option(help=f"Update rule: {_RULES}, or one that the job registers. [default: pipeoptim]")
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        help="Micro-batches of a batch, M. [default: 1; D (workers) for 2bw, cdp, rehearse; 2 x D for rules that flush]"
    ),
]
Predictor = Annotated[
    str | None,
    typer.Option(
        help="How a rule that predicts does so: improved, paper, released-code, partial. [default: its first]"
    ),
]
Backward = Annotated[
    str | None, typer.Option(help="What backward reads: stash, recompute, mixed. [default: the rule's first]")
]
Recompute = Annotated[
    str | None,
    typer.Option(
        help="Modules that keep only their inputs, and are run again by the backward: paths such as blocks.0, patterns "
        "such as blocks.*, all, or none. [default: what the model itself checkpoints, by stash; else none]",
        metavar="NAME,...",
    ),
]
Clip = Annotated[
    str | None,
    typer.Option(
        help="Clip gradients: stage:NORM, each stage by its own norm; previous:NORM, by all gradients' norm of an "
        "earlier batch; global:NORM, of the same batch (rules that flush). [default: none]",
        metavar="BY:NORM",
    ),
]
Ema = Annotated[
    float | None,
    typer.Option(
        help="Keep an exponential moving average of the weights with this decay, such as 0.999, and evaluate it. "
        "[default: the job's own; else none]",
        metavar="DECAY",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        help="fp32, or bf16 or fp16: compute by torch's autocast, with weights and optimizer in fp32. [default: fp32]"
    ),
]
LossScale = Annotated[
    str | None,
    typer.Option(
        help="What losses are multiplied by in fp16: a power of two; dynamic, from 65536; dynamic:N, from N. [default: "
        "dynamic]",
        metavar="N|dynamic",
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile", help="Compile the stages by torch's inductor first; needs a C++ compiler, and seconds to minutes."
    ),
]
Transport = Annotated[
    str | None,
    typer.Option(
        help="memory (threads of one process), shm (processes, shared memory), gloo (processes) or nccl (torchrun). "
        "[default: memory]"
    ),
]
Cuts = Annotated[
    str | None,
    typer.Option(help="measured, roofline, equal, or names of operations that end stages: a,b. [default: measured]"),
]
Devices = Annotated[
    str | None,
    typer.Option(help="cpu, cuda (worker k on device k), or one for each worker: cuda:0,cpu. [default: cuda if here]"),
]
Deadline = Annotated[
    float | None,
    typer.Option(
        help="Seconds that a batch of the loader, or a message, may be waited for. [default: 300]", metavar="SECONDS"
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        help="Updates to make (more, with --from). [default: what an interrupted run lacks; the job's own number; one "
        "epoch]"
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Train up to this many epochs in all, instead of --steps.")]
Seed = Annotated[int, typer.Option(help="Seed of model, data order and all random numbers.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Run this plan as it stands.")]
Resume = Annotated[Path | None, typer.Option("--from", help="Continue from this checkpoint or run folder.")]
Check = Annotated[
    str | None,
    typer.Option(
        help="Before training, hold the captured job to plain PyTorch: full, over two updates; quick, by what capture "
        "has seen; off. [default: full where it takes less than 5 s and a quarter of the free memory; else quick]",
        metavar="full|quick|off",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What was given on the command line to plan with, an option for each; None where nothing was said."""

    workers: Workers = None
    rule: Rule = None
    micro_batches: MicroBatches = None
    predictor: Predictor = None
    backward: Backward = None
    recompute: Recompute = None
    compile: Compile = None
    precision: Precision = None
    loss_scale: LossScale = None
    clip: Clip = None
    ema: Ema = None
    transport: Transport = None
    cuts: Cuts = None
    devices: Devices = None
    deadline_s: Deadline = None

    def given(self) -> dict[str, Any]:
        """The choices that were made, by name."""
        return {n: v for n in self.__slots__ if (v := getattr(self, n)) is not None}


def choosing(command: Callable[..., _T]) -> Callable[..., _T]:
    """A command whose parameter ``choices`` is put together from options, one for each field of :class:`Choices`."""
    told = get_type_hints(Choices, include_extras=True)
    options = [Parameter(n, Parameter.KEYWORD_ONLY, default=None, annotation=told[n]) for n in Choices.__slots__]
    own = list(signature(command, eval_str=True).parameters.values())
    at = [parameter.name for parameter in own].index("choices")
    together = [*own[:at], *options, *own[at + 1 :]]

    @wraps(command)
    def chosen(**given: Any) -> _T:
        return command(choices=Choices(**{n: given.pop(n) for n in Choices.__slots__}), **given)

    named_only = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in together]
    chosen.__signature__ = Signature(named_only)  # type: ignore[attr-defined]
    return chosen


def planned(
    job: Job,
    choices: Choices,
    seed: int,
    plan_file: Path | None,
    quiet: bool,
    party: ProcessGroup | None = None,
    resume: Path | None = None,
    restarted: Path | None = None,
) -> tuple[Captured, Plan, tuple[str, ...]]:
    """Capture the job, and read the plan or make it, with the reasons for its cuts.

    A run that is continued keeps its plan, unless something is given that the plan does not say; one that a launcher
    has restarted, in the folder `restarted`, keeps it in any case. In a party the leader does all this, and the others
    run what it says.

    Raises:
        UsageError: both a plan and choices that contradict it were given.
    """
    patience_s = _patience_s(choices, plan_file, resume, leads=party is None or party.leads)
    with doing("Capturing the model ...", quiet) as tell:
        captured = capture(job, seed=seed, deadline_s=patience_s, tell=tell)
    if party is not None and not party.leads:
        return captured, Plan.parse(party.take("plan")), ()
    kept = None if restarted is None else restarted / "plan.toml"
    longer = choices.deadline_s if plan_file is None else None  # nothing that is computed depends on it
    if kept is not None and kept.is_file() and read_plan(kept).model == captured.graph.fingerprint:
        plan_file, choices = kept, replace(choices, cuts=None, deadline_s=None)  # the plan was made with these cuts
    elif plan_file is None and resume is not None:
        plan_file = _plan_of(resume, captured, replace(choices, deadline_s=None))
        choices = choices if plan_file is None else replace(choices, deadline_s=None)
    if plan_file is not None:
        chosen = Planned(_waiting(_obey(read_plan(plan_file), choices), longer))
        if chosen.plan.compile and party is None:
            with doing("Compiling the stages ...", quiet):
                stages = fitted(captured, chosen.plan)
                lowered = for_plan(captured, chosen.plan)
                apart(lambda: compile_stages(job, lowered, chosen.plan, stages, seed), "compiling the stages")
    else:
        given = choices.given()
        beside = {} if resume is None else taken_over(resume, captured.graph.fingerprint, given)
        wanted = {"rule": "pipeoptim", **beside, **given}
        doings = "Planning, compiling and measuring" if wanted.get("compile") else "Planning and measuring"
        with doing(f"{doings} the stages ...", quiet) as tell:
            chosen = plan_with_reasons(job, captured=captured, seed=seed, tell=tell, **wanted)
        for line in chosen.told:
            announce(f"{line}.", quiet)
    show_choices(chosen.plan)
    if party is not None:
        party.give("plan", chosen.plan.text())
    return captured, chosen.plan, chosen.reasons


def _patience_s(choices: Choices, plan_file: Path | None, resume: Path | None, *, leads: bool) -> float:
    """Seconds that capturing waits for the loader: those given, or those of the plan that will be run, if it is here.

    Only the leader of a party needs the plan file: its absence elsewhere is no error.
    """
    if choices.deadline_s is not None:
        return choices.deadline_s
    if plan_file is not None:
        files = [plan_file] if leads or plan_file.is_file() else []
    else:
        files = [] if resume is None else list(plan_files(resume))
    return read_plan(files[0]).deadline_s if files else DEADLINE_S


def _waiting(plan: Plan, seconds: float | None) -> Plan:
    """The plan with another deadline, if one was given."""
    return plan if seconds is None else replace(plan, deadline_s=seconds)


def _plan_of(resume: Path, captured: Captured, choices: Choices) -> Path | None:
    """The plan file of the run that is continued, if it is for this model and says whatever was given."""
    for file in plan_files(resume) if choices.cuts is None else ():
        plan = read_plan(file)
        if plan.model == captured.graph.fingerprint and not list(_contradicted(plan, choices)):
            return file
    return None


@contextmanager
def same_in_all() -> Iterator[None]:
    """What the person has said wrong here, every process of a launcher finds wrong: the first on this host tells.

    Raises:
        ToldElsewhereError: it is not this one.
    """
    try:
        yield
    except UsageError as error:
        if not first_on_host():
            raise ToldElsewhereError from error
        raise


@contextmanager
def together(choices: Choices, restarts: int) -> Iterator[tuple[ProcessGroup | None, Choices]]:
    """:func:`joined`, and what then goes wrong before all have met is told once.

    Raises:
        UsageError: a choice cannot be had in a party.
        ToldElsewhereError: so another process on this host has told, or its launcher.
    """
    with same_in_all():
        party, choices = joined(choices, restarts)
    with nullcontext() if party is None else party.told_once():
        yield party, choices


def joined(choices: Choices, restarts: int) -> tuple[ProcessGroup | None, Choices]:
    """The party that this process belongs to, if a launcher has started it, and the choices that follow from it.

    Raises:
        UsageError: a choice cannot be had in a party.
    """
    place = launched()
    if place is None:
        if choices.transport == "nccl":
            raise needs_launcher()
        return None, choices
    transport = _between(choices, -(-place.size // place.nodes))
    told = f"the launcher has started {place.size} processes, one worker each"
    for name, given, right, why in (
        ("--workers", choices.workers, place.size, told),
        ("--transport", choices.transport, transport, told),
        ("--restarts", restarts or None, 0, "the launcher restarts; with `--out` a run then goes on by itself"),
    ):
        if given not in (None, right):
            raise UsageError(
                f"{name} under a launcher", got=str(given), expected=f"{right}: {why}", remedy=f"Leave {name} out."
            )
    return ProcessGroup(place), replace(choices, workers=place.size, transport=transport)


def _between(choices: Choices, processes: int) -> str:
    """The transport between a launcher's processes: nccl if asked for, or if this host has a device for each of its."""
    if choices.transport is not None:
        return choices.transport if choices.transport == "nccl" else "gloo"
    wanted = present() >= processes if choices.devices is None else "cuda" in choices.devices
    return "nccl" if wanted else "gloo"


def exclusive(steps: int | None, epochs: int | None) -> None:
    """Refuse two lengths.

    Raises:
        UsageError: both are given.
    """
    if steps is not None and epochs is not None:
        raise UsageError("--steps and --epochs", got="both", expected="one of them", remedy="Leave one of them out.")


def alone(command: str) -> None:
    """Refuse a command that is of no use in several processes at once.

    Raises:
        UsageError: a launcher has started this process.
        ToldElsewhereError: it has started another on this host before it.
    """
    with same_in_all():
        if launched() is not None:
            raise UsageError(
                f"`roundelay {command}` under a launcher",
                got="one of several processes that would all do the same",
                expected="the command by itself",
                remedy=f"Run `roundelay {command}` without the launcher; `train` is what it is for.",
            )


def _obey(plan: Plan, choices: Choices) -> Plan:
    if choices.cuts is not None:
        raise UsageError(
            "--cuts beside --plan",
            got=choices.cuts,
            expected="one of them: a plan says where it is cut",
            remedy="Leave --cuts out, or edit the plan's segments.",
        )
    for name, value, said in _contradicted(plan, choices):
        raise UsageError(
            f"--{name.replace('_', '-')} beside --plan",
            got=str(value),
            expected=f"{','.join(said) or 'none' if name in LISTED else said}, which the plan says",
            remedy="Leave the option out, or edit the plan.",
        )
    return plan


def _contradicted(plan: Plan, choices: Choices) -> Iterator[tuple[str, Any, Any]]:
    """(name, what was given, what the plan says) where these differ; cuts apart."""
    size = plan.num_workers
    for name, value in choices.given().items():
        if name == "cuts":
            continue
        said: Any = _said(plan, name, size)
        if said != _meant(name, value, size, plan):
            yield name, value, said


def _meant(name: str, value: Any, size: int, plan: Plan) -> Any:
    """A choice as a plan would say it."""
    if name == "devices":
        return named(value, size, plan.transport)
    return names_in(value) if name == "recompute" else value


LISTED = ("devices", "recompute")
"""Choices of which a plan has a list."""


def _said(plan: Plan, name: str, size: int) -> Any:
    """What a plan says of a choice."""
    of_workers = {"workers": size, "devices": tuple(worker.device for worker in plan.workers)}
    return of_workers[name] if name in of_workers else getattr(plan, name)
