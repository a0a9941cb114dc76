"""PipeOptim (2023), Tables II, IV, V, VI and Figures 5 and 6, in small: four stages, the paper's column in brackets.

`II` counts weight versions, `IV` and `VI` train, `V` reckons batches that fit a budget of bytes, `5` and `6` reckon
throughput on a virtual clock, and `digits` sets all rules beside each other on one task. The paper's five methods are
trained as it describes them: GPipe with one micro-batch, constant s, recomputation where a rule allows it; the rules
that accumulate have four micro-batches.
"""

from __future__ import annotations

import math
import statistics
from functools import partial

import torch

from benchmarks import papers
from benchmarks.common import table
from benchmarks.papers import Asked, Case, Found, Line, beside, optimizer
from benchmarks.pipeoptim import paper, reckoned
from benchmarks.tasks import chars, digits, grammar, images

LINES = (
    Line(paper.GPIPE, "gpipe", 1),
    Line(paper.PIPEDREAM, "pipedream", 1),
    Line(paper.TWO_BW, "pipedream-2bw", papers.D),
    Line(paper.SPECTRAIN, "spectrain:paper:recompute", 1),
    Line(paper.PIPEOPTIM, "pipeoptim:paper:recompute", 1),
)
OTHERS = (
    Line("PipeOptim, Algorithm 1 by the letter", "pipeoptim:paper:mixed", 1),
    Line("PipeOptim, released code", "pipeoptim:released-code:recompute", 1),
    Line("PipeOptim, improved", "pipeoptim:improved:stash", 1),
    Line("CDP-v2", "cdp-v2", papers.D),
)

SGDM = partial(optimizer, torch.optim.SGD, momentum=0.9)
OF_IMAGES = SGDM(lr=0.05, weight_decay=5e-4)
TARGET = 0.85
"""Of Table VI; the best classifier comes to about 0.9."""


def trained() -> list[Case]:
    """Table IV: a task of ours for each pair of optimizer and model that is not too much alike another one."""
    adamw, adam = partial(optimizer, torch.optim.AdamW), partial(optimizer, torch.optim.Adam)

    def case(title: str, stands_for: str, make: papers.Make, epochs: int, **more: object) -> Case:
        return Case(
            title=title,
            make=make,
            lines=LINES,
            epochs=epochs,
            paper=paper.ACCURACY[stands_for],
            **more,  # type: ignore[arg-type]
        )

    return [
        case(
            "SGDM, VGG-like, images",
            "SGDM, AlexNet, Tiny-ImageNet",
            partial(images.job, optimizer=OF_IMAGES, network="vgg"),
            16,
            target=TARGET,
            cuts="roofline",
        ),
        case(
            "SGDM, ResNet-like, images",
            "SGDM, ResNet-101, Tiny-ImageNet",
            partial(images.job, optimizer=OF_IMAGES, network="resnet"),
            12,
            target=TARGET,
            cuts="roofline",
        ),
        case(
            "AdamW, perceptron, characters",
            "AdamW, Residual LSTM, IMDb",
            partial(chars.job, optimizer=adamw(lr=1e-3)),
            5,
        ),
        case(
            "AdamW, VGG-like, images",
            "AdamW, VGG-16, CIFAR-100",
            partial(images.job, optimizer=adamw(lr=1e-3), network="vgg"),
            16,
            cuts="roofline",
        ),
        case(
            "Adam, perceptron, characters",
            "Adam, Residual LSTM, IMDb",
            partial(chars.job, optimizer=adam(lr=1e-3)),
            5,
        ),
        case(
            "Adam, transformer, grammar: BLEU",
            "Adam, GNMT-8, WMT-16",
            partial(grammar.job, optimizer=adam(lr=3e-3)),
            5,
            metric="bleu",
            scale=1.0,
        ),
    ]


def on_digits() -> list[Case]:
    """The perceptron of four layers, 15 epochs of batches of 32."""
    chosen = {
        "SGDM 0.01": SGDM(lr=0.01),
        "SGDM 0.02": SGDM(lr=0.02),
        "SGDM 0.05": SGDM(lr=0.05),
        "Adam 6e-3": optimizer(torch.optim.Adam, lr=6e-3),
    }
    return [
        Case(
            title=f"digits, {name}",
            make=partial(digits.job, optimizer=made),
            lines=(*LINES, *OTHERS),
            epochs=15,
            paper={},
        )
        for name, made in chosen.items()
    ]


def table_iv(what: Asked) -> str:
    """The highest value of each run."""
    return beside(what.run(trained()), paper.TITLES, papers.best)


def table_vi(what: Asked) -> str:
    """Top-1 and top-5, and updates to the target, of the two networks on images."""
    rows = []
    networks = reversed(what.run(trained()[:2]))  # the ResNet stands for ResNet-101
    for found, of_paper in zip(networks, paper.OVERALL.values(), strict=False):
        for title in paper.TITLES[1:]:
            rows.append([found.case.title, title, *overall(found, title), of_paper[title]])
    columns = ["case", "rule", "top-1", "top-5", f"updates to {TARGET:.0%}", "came there", "paper: top-1 / top-5, time"]
    return table(columns, rows)


def overall(found: Found, title: str) -> list[str]:
    """Highest top-1 and top-5, the median of the updates to the target, and how many runs reached it."""
    outcomes = [outcome for outcome in found.outcomes[title] if outcome.diverged is None]
    updates = [papers.updates_to(outcome, "accuracy", TARGET) for outcome in outcomes]
    there = [count for count in updates if math.isfinite(count)]
    five = [papers.best(outcome, "top5") for outcome in outcomes]
    return [
        found.text(title, papers.best),
        f"{100 * statistics.fmean(five):.1f}" if five else "–",
        f"{statistics.median(there):.0f}" if there else "–",
        f"{len(there)} of {len(found.outcomes[title])}",
    ]


def orderings(what: Asked) -> str:
    """Accuracy at the end of the run, every rule."""
    found = what.run(on_digits())
    titles = [line.title for line in (*LINES, *OTHERS)]
    rows = [[title, *(one.text(title, papers.last) for one in found)] for title in titles]
    return table(["rule", *(one.case.title for one in found)], rows) + "\n\n" + "\n".join(map(ordered, found))


def ordered(found: Found) -> str:
    """Whether the means stand as the issue is usually told: stashing < two versions < the rest, and near exact."""
    mean = {title: found.mean(title, papers.last) for title in found.outcomes}
    least = min(mean[title] for title in (paper.SPECTRAIN, paper.PIPEOPTIM, "CDP-v2"))
    stands = mean[paper.PIPEDREAM] < mean[paper.TWO_BW] < least
    away = mean[paper.GPIPE] - mean[paper.PIPEOPTIM]
    words = "PipeDream < PipeDream-2BW < {SpecTrain, PipeOptim, CDP-v2}"
    return (
        f"- {found.case.title}: {words} {'holds' if stands else 'does not hold'}; PipeOptim is {away:+.1f} below GPipe."
    )


PARTS = {
    "II": reckoned.table_ii,
    "IV": table_iv,
    "V": reckoned.table_v,
    "VI": table_vi,
    "5": reckoned.figure_5,
    "6": reckoned.figure_6,
    "digits": orderings,
}


def main() -> None:
    papers.tell(PARTS, papers.asked(__doc__ or "", list(PARTS), ["II", "digits"], "runs/pipeoptim"))


if __name__ == "__main__":
    main()
