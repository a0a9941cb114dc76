"""One reading of a plan: what the names in it stand for, looked up once. The rest of ``lower`` asks only this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from roundelay.ir.mesh import Mesh
from roundelay.ir.plan import Plan
from roundelay.ir.rule import UpdateRule, rule_named
from roundelay.ir.transports import Transport, transport_named
from roundelay.schedules import Form, Schedule, StateRoute, form_for, holders_of, schedule_for


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """A plan, with its rule, schedule, form, mesh and transport.

    Args:
        plan: the plan.
        rule: its update rule.
        schedule: that its workers run on; with the loop of the first holder where each has its own.
        form: of its layout; None in a pipeline.
        mesh: the holders of a stage, where they do not take turns.
        transport: how messages travel.
        backward_reads: which weights a backward reads: ``forward``, ``live`` or ``ahead``.
    """

    plan: Plan
    rule: UpdateRule
    schedule: Schedule
    form: Form | None
    mesh: Mesh
    transport: Transport
    backward_reads: str

    @property
    def flushes(self) -> bool:
        """Whether the stages empty after every batch."""
        return self.schedule.window == "batch"

    @property
    def free(self) -> bool:
        """Whether the order is not the schedule's, but that in which things become possible."""
        return self.schedule.free

    @property
    def slotted(self) -> bool:
        """Whether each batch has all micro-batches, some perhaps without rows."""
        return self.schedule.window == "slots"

    @property
    def sums_over_time(self) -> bool:
        """Whether the holders of a stage sum its gradients one after another."""
        return self.form is not None and self.form.sums

    @property
    def takes_turns(self) -> bool:
        """Whether the holders of a stage take micro-batches in turns."""
        return self.form is not None and self.form.takes_turns

    @property
    def moves_states(self) -> bool:
        """Whether the states of stages go from holder to holder."""
        return self.form is not None and self.form.moves_states

    @property
    def needs_norm(self) -> bool:
        """Whether stage 0 needs the norm of the whole model's gradient: for clipping, or for the loss scale."""
        return self.plan.clip.whole or self.plan.loss_scale.on

    @property
    def awaits_norm(self) -> bool:
        """Whether an update waits for the norm of its own batch: it clips by it, or is skipped if it is not finite."""
        return self.plan.clip.by == "global" or (self.plan.loss_scale.on and self.flushes)

    def schedule_of(self, holder: int) -> Schedule:
        """The schedule with the loop of one holder."""
        return _schedule(self.plan, self.rule, holder)

    def num_holders(self, stage: int) -> int:
        """How many workers hold a stage: one for each place of the mesh in each replica, or those that take turns."""
        if self.takes_turns:
            return holders_of(stage, self.plan.num_stages, self.plan.micro_batches)
        return self.mesh.size

    def route(self, stage: int) -> StateRoute:
        """On which way a stage's state goes from holder to holder."""
        return StateRoute(stage, self.plan.num_stages, self.plan.replicas)

    def updater(self, stage: int) -> int | None:
        """The one holder of a stage that makes its updates; None if each does."""
        return self.route(stage).updater if self.moves_states else None

    def num_updaters(self, stage: int) -> int:
        """How many holders of a stage make its updates, and report its state."""
        return 1 if self.moves_states else len(self.plan.stages[stage].workers)

    @property
    def updaters(self) -> int:
        """How many updates, of one holder each, a batch has."""
        return sum(self.num_updaters(stage) for stage in range(self.plan.num_stages))

    def number_in_batch(self, holder: int, index: int) -> int:
        """Which of a batch a holder's index-th micro-batch is to a table, from 0: replicas of a layout take turns."""
        replicates = self.form is not None and self.form.replicates
        return index * self.plan.replicas + holder if replicates else index

    def is_fresh(self, number: int, stage: int) -> bool:
        """Whether the rule's table lets a forward read W[t].

        Args:
            number: of the micro-batch in its batch, from 0.
            stage: k, from 0.
        """
        size = self.plan.batch_parts if self.slotted else 0
        return self.rule.is_fresh(number + 1, stage + 1, self.plan.num_stages, size)


def read(plan: Plan) -> Reading:
    """Look up what a plan's names stand for.

    Raises:
        PlanError: there is no such rule, schedule or transport.
    """
    rule = rule_named(plan.rule)
    return Reading(
        plan=plan,
        rule=rule,
        schedule=_schedule(plan, rule, 0),
        form=form_for(rule, plan.layout),
        mesh=plan.grid,
        transport=transport_named(plan.transport),
        backward_reads=rule.backward_reads(plan.backward),
    )


def _schedule(plan: Plan, rule: UpdateRule, holder: int) -> Schedule:
    together = plan.clip.by == "global" or plan.loss_scale.on
    return schedule_for(rule, plan.layout, holder, plan.batch_parts, plan.num_stages, together=together)
