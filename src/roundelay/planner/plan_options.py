"""The choices of a plan: every name, its kind and its help, once. Command line, Python and checks all take them here.

A choice that is None is not given; what a plan then has is said in its help.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypedDict, TypeVar, final, get_args, get_origin, get_type_hints

from roundelay.errors import PlanError
from roundelay.ir.given_signatures import GivenSignatures
from roundelay.ir.rule import rules
from roundelay.ir.transports import TRANSPORTS
from roundelay.planner.cluster import Cluster

_F = TypeVar("_F", bound=Callable[..., Any])

DEADLINE_S = 300.0
"""The deadline of a plan by default."""

CutRequest = str | Sequence[Sequence[str]]
"""A way to cut; comma-separated names of the operations that end stages; or a list for each stage of those that end its
segments."""


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """The description of a choice.

    Args:
        help: in the command line and in the documents; what it is by default stands in brackets at the end.
        flag: its option; by default its name.
        metavar: what stands for its value; by default its kind.
        typed: its kind in the command line, where Python takes more.
    """

    help: str
    flag: str = ""
    metavar: str | None = None
    typed: Any = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Choices for a plan; None is not given."""

    workers: Annotated[
        int | None,
        Choice(
            "Number of workers (of each replica), with one stage each, or two with zb-v. [default: one per GPU; on "
            "the CPU one with all threads or two with half of them each, whichever is faster]"
        ),
    ] = None
    layout: Annotated[
        str | None,
        Choice(
            "How micro-batches and stages lie on workers: pipeline, or cyclic data parallelism: single (one worker), "
            "dp (one for each micro-batch), mp (several for each stage), zero (as dp, with states that go round). "
            "[default: pipeline]",
            metavar="pipeline|single|dp|mp|zero",
        ),
    ] = None
    stages: Annotated[
        int | None, Choice("Stages of a --layout other than pipeline. [default: one per micro-batch]")
    ] = None
    data_parallel: Annotated[
        int | None,
        Choice(
            "Replicas, R, among which the micro-batches of a batch are dealt out; each has workers of its own. "
            "[default: 1]"
        ),
    ] = None
    tensor_parallel: Annotated[
        int | None,
        Choice(
            "Workers among which the matrix products of each stage are divided, in pairs as Megatron-LM does: columns "
            "of the first, rows of the second. [default: 1]"
        ),
    ] = None
    signatures: Annotated[
        str | Path | GivenSignatures | None,
        Choice(
            "File with a mesh, and how parameters and results lie on it, as a plan's `mesh`, [parameters] and "
            "[outputs] say; in place of --tensor-parallel.",
            metavar="FILE",
            typed=Path | None,
        ),
    ] = None
    zero: Annotated[
        int | None,
        Choice(
            "1: each replica has the optimizer's states of a part of the weights, updates it, and gets the others' "
            "parts (ZeRO); 2: it adds up the gradients of this part only; 3: it keeps this part of the weights only, "
            "and gathers each segment's before it runs. [default: 0]"
        ),
    ] = None
    hybrid: Annotated[
        str | None,
        Choice(
            "Hybrid sharding, in place of --data-parallel and --zero: 2x4 are 2 groups of 4 replicas; each group's "
            "keep parts of the weights as with --zero 3, and groups add up their gradients once a batch.",
            metavar="RxS",
        ),
    ] = None
    cluster: Annotated[
        str | Path | Cluster | None,
        Choice(
            "File with [[workers]] that differ in speed and memory, for which to plan; for --space all with [mesh], a "
            "size and a link for each axis. [default: this host's, all alike]",
            metavar="FILE",
            typed=Path | None,
        ),
    ] = None
    micro_batches: Annotated[
        int | None,
        Choice(
            "Micro-batches per batch, M. [default: 1; D (workers) for 2bw, cdp, rehearse; 2 x D for rules that flush, "
            "where a batch's loss is the mean of its parts'; "
            "with --layout dp or zero 2, or one for each process of a launcher, with single or mp as many as stages, "
            "or 4]"
        ),
    ] = None
    recompute: Annotated[
        str | Sequence[str] | None,
        Choice(
            "Modules that keep only their inputs and are recomputed in the backward: paths such as blocks.0, patterns "
            "such as blocks.*, all, or none. [default: what the model itself checkpoints, with stash; else none]",
            metavar="NAME,...",
            typed=str | None,
        ),
    ] = None
    compile: Annotated[
        bool | None,
        Choice(
            "Compile the stages with torch.compile; needs a C++ compiler, and seconds to minutes.", flag="--compile"
        ),
    ] = None
    precision: Annotated[
        str | None,
        Choice(
            "fp32, or bf16 or fp16: compute with torch.autocast; weights and optimizer stay in fp32. [default: fp32]"
        ),
    ] = None
    loss_scale: Annotated[
        str | None,
        Choice(
            "Loss scale for fp16: a power of two; dynamic, from 65536; dynamic:N, from N. [default: dynamic]",
            metavar="N|dynamic",
        ),
    ] = None
    clip: Annotated[
        str | None,
        Choice(
            "Clip gradients: stage:NORM, each stage by its own norm; previous:NORM, by all gradients' norm of an "
            "earlier batch; global:NORM, of the same batch (rules that flush; in --layout dp, cdp-v1 too). "
            "[default: none]",
            metavar="BY:NORM",
        ),
    ] = None
    ema: Annotated[
        float | None,
        Choice(
            "Keep an exponential moving average of the weights with this decay, such as 0.999, and evaluate it. "
            "[default: the job's own; else none]",
            metavar="DECAY",
        ),
    ] = None
    deterministic: Annotated[
        bool | None,
        Choice(
            "Compute so that the same run gives the same bits on a GPU too; slower. Refused where torch cannot.",
            flag="--deterministic",
        ),
    ] = None
    transport: Annotated[
        str | None,
        Choice(", ".join(f"{each.name} ({each.summary})" for each in TRANSPORTS.values()) + ". [default: memory]"),
    ] = None
    cuts: Annotated[
        CutRequest | None,
        Choice(
            "measured, roofline, equal, flops, memory-time (few activations of staggered micro-batches at one time), "
            "or names of operations that end stages: a,b. [default: measured]",
            typed=str | None,
        ),
    ] = None
    devices: Annotated[
        str | None,
        Choice("cpu, cuda (worker k on device k), or one for each worker: cuda:0,cpu. [default: cuda if here]"),
    ] = None
    threads: Annotated[
        int | None,
        Choice(
            "Intra-op threads of each worker. [default: this host's cores, shared by its workers on the CPU; 1 on a "
            "GPU]"
        ),
    ] = None
    deadline_s: Annotated[
        float | None,
        Choice(
            f"Longest wait for a batch of the loader, or for a message. [default: {DEADLINE_S:g}]", metavar="SECONDS"
        ),
    ] = None
    memory_limit: Annotated[
        str | int | None,
        Choice(
            "Refuse a plan by which a worker would hold more, by prediction: weights, gradients, optimizer states, "
            "versions, activations, messages. Without torch itself.",
            metavar="BYTES",
            typed=str | None,
        ),
    ] = None
    rule: Annotated[
        str | None,
        Choice(
            f"Update rule: {', '.join(rule.name for rule in rules())}, or one that the job registers. [default: 1f1b, "
            "which trains as plain PyTorch does; in a layout cdp-v2]"
        ),
    ] = None
    predictor: Annotated[
        str | None,
        Choice(
            "Weight prediction, for rules that predict: improved, paper, released-code, partial. [default: its first]"
        ),
    ] = None
    backward: Annotated[
        str | None,
        Choice("Weights and tapes of the backward: stash, recompute, mixed. [default: the rule's first]"),
    ] = None

    def given(self) -> dict[str, Any]:
        """Those that are given, by name."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}

    def names(self) -> set[str]:
        """Names of those that are given."""
        return set(self.given())

    def over(self, others: Choices) -> Choices:
        """These, and of the others those that are not given here."""
        return replace(others, **self.given())

    def check_kinds(self) -> None:
        """Refuse values of another kind than their choice's.

        Raises:
            PlanError: naming the choice.
        """
        for name, value in self.given().items():
            kinds = [kind for kind in get_args(_kinds()[name]) if kind is not NoneType]
            if not any(_is(value, kind) for kind in kinds):
                expected = " or ".join(dict.fromkeys(_KINDS[kind] for kind in kinds if kind in _KINDS))
                raise PlanError(name, got=repr(value), expected=expected, remedy=f"Correct {name}.")


class AnyRuleKeywords(TypedDict, total=False):
    """Keywords of a function that plans for any rule; :class:`Choices` says what they mean."""

    workers: int | None
    layout: str | None
    stages: int | None
    data_parallel: int | None
    tensor_parallel: int | None
    signatures: str | Path | GivenSignatures | None
    zero: int | None
    hybrid: str | None
    cluster: str | Path | Cluster | None
    micro_batches: int | None
    recompute: str | Sequence[str] | None
    compile: bool | None
    precision: str | None
    loss_scale: str | None
    clip: str | None
    ema: float | None
    deterministic: bool | None
    transport: str | None
    cuts: CutRequest | None
    devices: str | None
    threads: int | None
    deadline_s: float | None
    memory_limit: str | int | None


class Keywords(AnyRuleKeywords, total=False):
    """Keywords of a function that plans; :class:`Choices` says what they mean."""

    rule: str | None
    predictor: str | None
    backward: str | None


OF_A_RULE = ("rule", "predictor", "backward")
"""Choices that a comparison makes itself."""

_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "True or False", str: "a name"}


@cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(Choices)


@cache
def descriptions() -> dict[str, Choice]:
    """The description of each choice, by name."""
    hints = get_type_hints(Choices, include_extras=True)
    return {one.name: get_args(hints[one.name])[1] for one in fields(Choices)}


def flag(name: str) -> str:
    """The option of a choice."""
    return "--" + name.replace("_", "-")


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; True and False are no numbers."""
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, get_origin(kind) or kind)


def from_keywords(function: Callable[..., Any], keywords: Mapping[str, Any], without: Collection[str] = ()) -> Choices:
    """The choices that a function was given as keywords.

    Args:
        function: for the error.
        keywords: by name.
        without: choices that it does not take.

    Raises:
        TypeError: it takes no such keyword, naming similar ones that it takes.
    """
    known = [one.name for one in fields(Choices) if one.name not in without]
    for name in keywords:
        if name not in known:
            names = [*_own(function), *known]
            near = difflib.get_close_matches(name, list(dict.fromkeys(names)), n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it knows {', '.join(names)}"
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}; {hint}")
    return Choices(**keywords)


def _own(function: Callable[..., Any]) -> list[str]:
    """The keywords of a function that are no choices."""
    every: Iterable[Parameter] = signature(function, follow_wrapped=True).parameters.values()
    kinds = _kinds()
    return [one.name for one in every if one.kind is one.KEYWORD_ONLY and one.name not in kinds]


def shows_choices(function: _F) -> _F:
    """Let a function that takes choices as ``**choices`` show each of them in its signature, for completion."""
    own = signature(function)
    keywords = next(one for one in own.parameters.values() if one.kind is one.VAR_KEYWORD)
    without = OF_A_RULE if "AnyRule" in str(keywords.annotation) else ()
    every = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in _kinds().items()
        if name not in without
    ]
    kept = [one for one in own.parameters.values() if one is not keywords]
    function.__signature__ = own.replace(parameters=[*kept, *every])  # type: ignore[attr-defined]
    return function
