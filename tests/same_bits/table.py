"""The jobs: which rule runs with which model, transport, size and option.

Every update rule runs in each of its backward modes and with each of its predictors. What else can be chosen is spread
over these jobs so that any two choices meet in some job (:func:`uncovered` names the pairs that do not).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import combinations, product

MODES = ("stash", "recompute", "mixed")
FROM_STATE = ("improved", "paper", "released-code")

RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gpipe": (MODES, ("none",)),
    "1f1b": (MODES, ("none",)),
    "zb-h1": (MODES, ("none",)),
    "zb-v": (MODES, ("none",)),
    "pipedream": (("stash",), ("none",)),
    "pipedream-vertical": (("stash",), ("none",)),
    "pipedream-2bw": (("stash",), ("none",)),
    "cdp-v1": (("stash",), ("none",)),
    "cdp-v2": (("stash",), ("none",)),
    "spectrain": (("mixed", "recompute"), FROM_STATE[:2]),
    "pipeoptim": (MODES, FROM_STATE),
    "async": (("mixed", "recompute"), ("none",)),
    "lookahead": (("mixed", "recompute", "stash"), ("improved",)),
    "rehearse": (("mixed", "recompute"), ("partial",)),
}
"""Every update rule with the backward modes and the predictors that it allows."""

FLUSHING = ("gpipe", "1f1b", "zb-h1", "zb-v")
PREVIOUS = ("pipedream-2bw", "cdp-v1", "cdp-v2")
"""Rules that read the version before the newest, for which M must be D - 1 at least."""

LEVELS: dict[str, tuple[str, ...]] = {
    "transport": ("memory", "shm", "gloo"),
    "model": ("deep", "conv", "transformer", "lstm", "frozen"),
    "optimizer": ("momentum", "adam", "adamw", "nesterov", "groups", "rmsprop"),
    "size": ("2x1", "3x2", "4x3", "2x4", "4x1"),
    "clip": ("none", "stage:0.3", "previous:0.5", "global:0.5"),
    "precision": ("fp32", "bf16", "fp16"),
    "recompute": ("no", "all"),
    "ema": ("no", "0.9"),
    "data": ("even", "short", "ragged"),
    "loss": ("mean", "sum", "metrics"),
}
"""What is chosen beside the rule, and from what; ``size`` is workers x micro-batches."""

KINDS = ("train", "resume", "verify", "command", "torchrun")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job; all but ``kind``, ``backward`` and ``predictor`` are levels of :data:`LEVELS`.

    Args:
        kind: ``train``: one run. ``resume``: one that is stopped in mid-flight, and one that goes on. ``verify``: held
            to its reference. ``command``: as ``resume``, from the command line. ``torchrun``: a run under torchrun.
    """

    kind: str = "train"
    rule: str
    backward: str
    predictor: str
    transport: str = "memory"
    model: str = "deep"
    optimizer: str = "momentum"
    size: str = "2x1"
    clip: str = "none"
    precision: str = "fp32"
    recompute: str = "no"
    ema: str = "no"
    data: str = "even"
    loss: str = "mean"

    @property
    def name(self) -> str:
        """What a person calls it; no two jobs have the same."""
        plain = {f.name: f.default for f in fields(self)}
        shown = ("kind", "rule", "backward", "predictor", "transport", "model", "optimizer", "size")
        rest = [f"{n}={v}" for n, v in asdict(self).items() if n not in shown and v != plain[n]]
        first = [getattr(self, name) for name in shown]
        return " ".join([*(part for part in first if part != "none"), *rest])

    @property
    def workers(self) -> int:
        """D."""
        return int(self.size.split("x")[0])

    @property
    def micro_batches(self) -> int:
        """M."""
        return int(self.size.split("x")[1])


def allowed(case: Case) -> bool:
    """Whether Roundelay runs it: what is refused by design is no job here."""
    return not (
        (case.clip.startswith("global") and case.rule not in FLUSHING)
        or (case.recompute == "all" and case.backward == "recompute")
        or (case.rule in PREVIOUS and case.micro_batches < case.workers - 1)
        or (case.model == "lstm" and case.precision == "fp16")  # torch has no such LSTM on a CPU
    )


def variants() -> Iterator[dict[str, str]]:
    """Every rule in each mode with each predictor."""
    for rule, (modes, predictors) in RULES.items():
        for backward, predictor in product(modes, predictors):
            yield {"rule": rule, "backward": backward, "predictor": predictor}


def spread(kind: str, chosen: list[dict[str, str]], met: Counter[tuple[str, ...]]) -> list[Case]:
    """Jobs of these variants, all else chosen one by one so that choices meet that have met the least.

    Args:
        kind: of the jobs.
        chosen: fields that are given for each.
        met: how often two levels have met; counted on.
    """
    made = []
    for given in chosen:
        case = Case(kind=kind, **given)
        settled = ["rule"]
        for factor in sorted(LEVELS, key=lambda name: -len(LEVELS[name])):
            if factor not in given:
                case = _best(case, factor, settled, met)
            settled.append(factor)
        met.update(_pairs(case))
        made.append(case)
    return made


def _best(case: Case, factor: str, settled: list[str], met: Counter[tuple[str, ...]]) -> Case:
    """The case with the level of ``factor`` that has met the settled ones least often."""
    tried = [_with(case, factor, level) for level in LEVELS[factor]]

    def costs(one: Case) -> tuple[int, int]:
        counts = [met[_pair(one, factor, other)] for other in settled]
        return -counts.count(0), sum(counts)

    return min(filter(allowed, tried), key=costs)


def _with(case: Case, factor: str, level: str) -> Case:
    return Case(**(asdict(case) | {factor: level}))


def _pair(case: Case, one: str, other: str) -> tuple[str, ...]:
    first, second = sorted((one, other))
    return first, getattr(case, first), second, getattr(case, second)


def _pairs(case: Case) -> list[tuple[str, ...]]:
    return [_pair(case, one, other) for one, other in combinations(["rule", *LEVELS], 2)]


def uncovered(made: list[Case]) -> list[str]:
    """Pairs of levels that could meet in a job, and meet in none."""
    met = {pair for case in made for pair in _pairs(case)}
    levels = {"rule": tuple(RULES)} | LEVELS
    missing = []
    for one, other in combinations(sorted(levels), 2):
        for pair in product(levels[one], levels[other]):
            if (one, pair[0], other, pair[1]) not in met and _could_meet({one: pair[0], other: pair[1]}):
                missing.append(f"{one}={pair[0]} with {other}={pair[1]}")
    return missing


def _could_meet(two: dict[str, str]) -> bool:
    chosen = [{"size": "2x4"} | given | two for given in variants() if given["rule"] == two.get("rule", given["rule"])]
    return any(allowed(Case(**fields)) for fields in chosen)


RESUMED = (
    {"rule": "gpipe", "backward": "stash", "predictor": "none", "precision": "fp16", "model": "conv"},
    {"rule": "1f1b", "backward": "recompute", "predictor": "none", "model": "transformer", "transport": "memory"},
    {"rule": "zb-h1", "backward": "stash", "predictor": "none", "size": "3x2", "model": "lstm"},
    {"rule": "zb-v", "backward": "stash", "predictor": "none", "size": "2x4", "model": "deep"},
    {"rule": "pipedream", "backward": "stash", "predictor": "none", "size": "4x1", "transport": "memory"},
    {"rule": "pipedream-vertical", "backward": "stash", "predictor": "none", "size": "3x2", "transport": "shm"},
    {"rule": "pipedream-2bw", "backward": "stash", "predictor": "none", "size": "4x3", "transport": "gloo"},
    {"rule": "cdp-v2", "backward": "stash", "predictor": "none", "size": "4x3", "model": "transformer"},
    {"rule": "spectrain", "backward": "mixed", "predictor": "improved", "size": "3x2", "transport": "gloo"},
    {"rule": "pipeoptim", "backward": "mixed", "predictor": "improved", "size": "4x1", "ema": "0.9"},
    {"rule": "pipeoptim", "backward": "stash", "predictor": "released-code", "size": "4x1", "optimizer": "momentum"},
    {"rule": "pipeoptim", "backward": "recompute", "predictor": "paper", "size": "3x2", "optimizer": "rmsprop"},
    {"rule": "async", "backward": "mixed", "predictor": "none", "size": "4x1", "recompute": "all"},
    {"rule": "lookahead", "backward": "mixed", "predictor": "improved", "size": "4x1", "transport": "shm"},
    {"rule": "rehearse", "backward": "mixed", "predictor": "partial", "size": "4x3"},
    {"rule": "rehearse", "backward": "recompute", "predictor": "partial", "size": "3x2", "transport": "gloo"},
)
"""What is fixed of the jobs that are stopped in mid-flight and go on."""

VERIFIED = (
    {"rule": "1f1b", "backward": "stash", "predictor": "none", "clip": "global:0.5"},
    {"rule": "zb-v", "backward": "stash", "predictor": "none"},
    {"rule": "pipedream-2bw", "backward": "stash", "predictor": "none", "size": "4x3"},
    {"rule": "pipeoptim", "backward": "mixed", "predictor": "improved", "size": "4x1"},
    {"rule": "rehearse", "backward": "mixed", "predictor": "partial", "size": "3x2", "precision": "fp16"},
)
COMMANDS = (
    {"rule": "1f1b", "backward": "stash", "predictor": "none", "transport": "memory", "size": "2x4"},
    {"rule": "pipeoptim", "backward": "mixed", "predictor": "improved", "transport": "shm", "size": "3x2"},
    {"rule": "cdp-v1", "backward": "stash", "predictor": "none", "transport": "gloo", "size": "2x4"},
)
LAUNCHED = ({"rule": "pipedream", "backward": "stash", "predictor": "none", "transport": "gloo", "size": "2x4"},)


def cases() -> list[Case]:
    """All jobs: every variant three times, rules that have one variant five times, then those that are told above."""
    met: Counter[tuple[str, ...]] = Counter()
    every = list(variants())
    alone = [given for given in every if len(RULES[given["rule"]][0]) == 1]
    made = spread("train", every, met) + spread("train", [*every[::-1], *every, *alone, *alone], met)
    for kind, chosen in (("resume", RESUMED), ("verify", VERIFIED), ("command", COMMANDS), ("torchrun", LAUNCHED)):
        made += spread(kind, list(chosen), met)
    return made
