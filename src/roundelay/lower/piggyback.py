"""What rides on messages beside values and gradients, or travels apart: norms and squares of gradients, loss scales."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roundelay.ir.clip import NORM, SQUARE, Clip
from roundelay.ir.loss_scale import SCALE, LossScale
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.ir.stage import Edge
from roundelay.schedules import schedule_named


@dataclass(frozen=True, slots=True)
class Riding:
    """What rides between neighbours, and what beside it has channels of its own.

    Args:
        norm: forward, the newest norm of all gradients that stage 0 knew.
        scale: forward, the micro-batch's loss scale.
        square: back, with a batch's last micro-batch, the squared norms of this stage's gradients and all later ones'.
        apart: whether they go to stage 0 on channels of their own instead, each stage's own, behind the batch's last
            second half: where there are halves, the last gradient message is sent before the gradients are whole.
        awaited: whether updates wait for the norm of all gradients of their batch, which stage 0 tells on channels of
            their own.
    """

    norm: bool
    scale: bool
    square: bool
    apart: bool
    awaited: bool

    @staticmethod
    def of(plan: Plan) -> Riding:
        """What a plan needs.

        Raises:
            PlanError: its rule, its clipping or its loss scale is unknown.
        """
        clip, scaled = Clip.parse(plan.clip), LossScale.parse(plan.loss_scale).on
        schedule = schedule_named(rule_named(plan.rule).schedule)
        asked = clip.whole or scaled
        return Riding(
            norm=clip.by == "previous",
            scale=scaled,
            square=asked and not schedule.halved,
            apart=asked and schedule.halved,
            awaited=clip.by == "global" or (scaled and schedule.window == "batch"),
        )

    def on(self, edge: Edge) -> Edge:
        """An edge with what rides on it: nothing on one that skips stages."""
        if edge.target != edge.source + 1:
            return edge
        forward = (NORM,) * self.norm + (SCALE,) * self.scale
        return replace(edge, values=(*edge.values, *forward), gradients=(*edge.gradients, *(SQUARE,) * self.square))
