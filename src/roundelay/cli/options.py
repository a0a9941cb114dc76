"""Options that several commands share. No torch is needed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from roundelay.cli.changed_by_job import PathResolver
from roundelay.cli.signals import Grace
from roundelay.env import launched
from roundelay.errors import UsageError
from roundelay.ir.rule import rules
from roundelay.ir.transports import TRANSPORTS

_T = TypeVar("_T")

JobFile = Annotated[
    Path, typer.Argument(help="Python file that defines `def job(seed) -> roundelay.Job`.", metavar="JOB.py")
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Number of workers (of each replica), with one stage each, or two with zb-v. [default: one per GPU; on "
        "the CPU one with all threads or two with half of them each, whichever is faster]"
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        help="How micro-batches and stages lie on workers: pipeline, or cyclic data parallelism: single (one worker), "
        "dp (one for each micro-batch), mp (several for each stage), zero (as dp, with states that go round). "
        "[default: pipeline]",
        metavar="pipeline|single|dp|mp|zero",
    ),
]
Stages = Annotated[
    int | None, typer.Option(help="Stages of a --layout other than pipeline. [default: one per micro-batch]")
]
DataParallel = Annotated[
    int | None,
    typer.Option(
        help="Replicas, R, among which the micro-batches of a batch are dealt out; each has workers of its own. "
        "[default: 1]"
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(
        help="Workers among which the matrix products of each stage are divided, in pairs as Megatron-LM does: columns "
        "of the first, rows of the second. [default: 1]"
    ),
]
SignatureFile = Annotated[
    Path | None,
    typer.Option(
        "--signatures",
        help="File with a mesh, and how parameters and results lie on it, as a plan's `mesh`, [parameters] and "
        "[outputs] say; in place of --tensor-parallel.",
        metavar="FILE",
    ),
]
Zero = Annotated[
    int | None,
    typer.Option(
        help="1: each replica has the optimizer's states of a part of the weights, updates it, and gets the others' "
        "parts (ZeRO). [default: 0]"
    ),
]
_RULES = ", ".join(rule.name for rule in rules())
Rule = Annotated[
    str | None,
    typer.Option(
        help=f"Update rule: {_RULES}, or one that the job registers. [default: 1f1b, which trains as plain PyTorch "
        "does; in a layout cdp-v2]"
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        help="Micro-batches per batch, M. [default: 1; D (workers) for 2bw, cdp, rehearse; 2 x D for rules that flush, "
        "where a batch's loss is the mean of its parts'; "
        "with --layout dp or zero 2, or one for each process of a launcher, with single or mp as many as stages, or 4]"
    ),
]
Predictor = Annotated[
    str | None,
    typer.Option(
        help="Weight prediction, for rules that predict: improved, paper, released-code, partial. [default: its first]"
    ),
]
Backward = Annotated[
    str | None,
    typer.Option(help="Weights and tapes of the backward: stash, recompute, mixed. [default: the rule's first]"),
]
Recompute = Annotated[
    str | None,
    typer.Option(
        help="Modules that keep only their inputs and are recomputed in the backward: paths such as blocks.0, patterns "
        "such as blocks.*, all, or none. [default: what the model itself checkpoints, with stash; else none]",
        metavar="NAME,...",
    ),
]
Clip = Annotated[
    str | None,
    typer.Option(
        help="Clip gradients: stage:NORM, each stage by its own norm; previous:NORM, by all gradients' norm of an "
        "earlier batch; global:NORM, of the same batch (rules that flush; in --layout dp, cdp-v1 too). [default: none]",
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
        help="fp32, or bf16 or fp16: compute with torch.autocast; weights and optimizer stay in fp32. [default: fp32]"
    ),
]
LossScale = Annotated[
    str | None,
    typer.Option(
        help="Loss scale for fp16: a power of two; dynamic, from 65536; dynamic:N, from N. [default: dynamic]",
        metavar="N|dynamic",
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile", help="Compile the stages with torch.compile; needs a C++ compiler, and seconds to minutes."
    ),
]
Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic",
        help="Compute so that the same run gives the same bits on a GPU too; slower. Refused where torch cannot.",
    ),
]
Transport = Annotated[
    str | None,
    typer.Option(
        help=", ".join(f"{each.name} ({each.summary})" for each in TRANSPORTS.values()) + ". [default: memory]"
    ),
]
Cuts = Annotated[
    str | None,
    typer.Option(
        help="measured, roofline, equal, flops, memory-time (few activations of staggered micro-batches at one time), "
        "or names of operations that end stages: a,b. [default: measured]"
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(help="cpu, cuda (worker k on device k), or one for each worker: cuda:0,cpu. [default: cuda if here]"),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Intra-op threads of each worker. [default: this host's cores, shared by its workers on the CPU; 1 on a "
        "GPU]"
    ),
]
Deadline = Annotated[
    float | None,
    typer.Option(help="Longest wait for a batch of the loader, or for a message. [default: 300]", metavar="SECONDS"),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        help="Refuse a plan by which a worker would hold more, by prediction: weights, gradients, optimizer states, "
        "versions, activations, messages. Without torch itself.",
        metavar="BYTES",
    ),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonChoices:
    """Choices for the plans of any rule, one option each; None where the command line has no such option."""

    workers: Workers = None
    layout: Layout = None
    stages: Stages = None
    data_parallel: DataParallel = None
    tensor_parallel: TensorParallel = None
    signatures: SignatureFile = None
    zero: Zero = None
    micro_batches: MicroBatches = None
    recompute: Recompute = None
    compile: Compile = None
    precision: Precision = None
    loss_scale: LossScale = None
    clip: Clip = None
    ema: Ema = None
    deterministic: Deterministic = None
    transport: Transport = None
    cuts: Cuts = None
    devices: Devices = None
    threads: Threads = None
    deadline_s: Deadline = None
    memory_limit: MemoryLimit = None

    def given(self) -> dict[str, Any]:
        """The choices that are not None, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices(CommonChoices):
    """Choices for a plan."""

    rule: Rule = None
    predictor: Predictor = None
    backward: Backward = None


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
    groups = {
        name: hint for name, hint in get_type_hints(command).items() if isinstance(hint, type) and is_dataclass(hint)
    }
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        if (group := groups.get(parameter.name)) is None:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(group, include_extras=True)
        parameters += [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
            for field in fields(group)
        ]

    @wraps(command)
    def expanded(**given: Any) -> _T:
        together = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**together, **given)

    expanded.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return expanded


def exclusive(steps: int | None, epochs: int | None) -> None:
    """Refuse ``--steps`` together with ``--epochs``.

    Raises:
        UsageError: both are given.
    """
    if steps is not None and epochs is not None:
        raise UsageError("--steps and --epochs", got="both", expected="one of them", remedy="Leave one of them out.")


def refuse_nccl(command: str, transport: str | None) -> None:
    """Refuse a command that runs in one process over nccl.

    Raises:
        UsageError: the transport is nccl.
    """
    if transport == "nccl":
        raise UsageError(
            f"`roundelay {command}` over nccl",
            got="one process",
            expected="a transport between threads: nccl carries tensors between processes that `train` starts",
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
            remedy=f"Run `roundelay {command}` without the launcher; only `train` runs under one.",
        )
