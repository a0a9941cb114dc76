"""Cyclic Data Parallelism (2024), Table 2 and Figure 3, in small: delayed rules beside exact mini-batch training.

Four stages. With four micro-batches of 8 rows in a batch of 32, stages = micro-batches, as in the paper; with eight
of 4 rows, the 8 x 4 setting of the authors' released commands, in which CDP-v2 reads the newest weights wherever i + j
> 4. The network and the images are those of `benchmarks/tasks`; momentum, weight decay, rate, and its drops by 0.2 at
30, 60 and 90 % are the paper's for CIFAR-10.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch

from benchmarks import papers
from benchmarks.common import table
from benchmarks.papers import Asked, Case, Found, Line, beside, optimizer
from benchmarks.tasks import chars, digits, images
from roundelay.comparison.comparison_table import reported_curve
from roundelay.comparison.run_results import LOSS

TITLES = ("DP", "CDP-v1", "CDP-v2")
RULES = ("1f1b", "cdp-v1", "cdp-v2")
EPOCHS = 16
RESNET18 = {"DP": "94.7", "CDP-v1": "94.1", "CDP-v2": "94.8"}
"""Table 2 (a): CIFAR-10; a standard deviation below 0.08 over five runs."""

MOMENTS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Where the curves of Figure 3 are read, as shares of the training."""


def drops(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The paper's schedule, as shares of the training."""
    updates = EPOCHS * images.UPDATES
    return torch.optim.lr_scheduler.MultiStepLR(
        optimizer, [updates * 3 // 10, updates * 6 // 10, updates * 9 // 10], 0.2
    )


def lines(micro_batches: int) -> list[Line]:
    """The three rules."""
    return [Line(title, rule, micro_batches) for title, rule in zip(TITLES, RULES, strict=True)]


def cases(micro_batches: int, paper: dict[str, str]) -> list[Case]:
    """On images, a ResNet; on digits and characters, perceptrons."""
    sgdm = optimizer(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)
    plain = optimizer(torch.optim.SGD, lr=0.02, momentum=0.9)
    how = f"{papers.D} stages, {micro_batches} micro-batches"
    return [
        Case(
            title=f"ResNet on images, {how}",
            make=partial(images.job, optimizer=sgdm, network="resnet", scheduler=drops),
            lines=lines(micro_batches),
            epochs=EPOCHS,
            cuts="roofline",
            paper=paper,
        ),
        Case(
            title=f"perceptron on digits, {how}",
            make=partial(digits.job, optimizer=plain),
            lines=lines(micro_batches),
            epochs=15,
            paper={},
        ),
        Case(
            title=f"perceptron on characters, {how}",
            make=partial(chars.job, optimizer=optimizer(torch.optim.AdamW, lr=1e-3)),
            lines=lines(micro_batches),
            epochs=5,
            paper={},
        ),
    ]


def found(what: Asked) -> list[Found]:
    """Both settings; what the folder has is not run again."""
    return what.run([*cases(papers.D, RESNET18), *cases(2 * papers.D, {})])


def table_2(what: Asked) -> str:
    """Accuracy at the end; the paper's in brackets."""
    return beside(found(what), TITLES, papers.last)


def figure_3(what: Asked) -> str:
    """The training loss as the training goes on; its curves lie in the folder, too."""
    rows = []
    for one in found(what):
        for title, outcomes in one.outcomes.items():
            curves = [reported_curve(outcome, LOSS) for outcome in outcomes if outcome.diverged is None]
            cells = [
                f"{statistics.fmean(curve[round(at * (len(curve) - 1))].value for curve in curves):.3f}"
                if curves
                else "–"
                for at in MOMENTS
            ]
            rows.append([one.case.title, title, *cells])
    return table(["case", "rule", *(f"{at:.0%}" for at in MOMENTS)], rows)


PARTS = {"2": table_2, "3": figure_3}


def main() -> None:
    papers.tell(PARTS, papers.asked(__doc__ or "", list(PARTS), ["2"], "runs/cdp"))


if __name__ == "__main__":
    main()
