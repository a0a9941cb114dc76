"""What a planner asks about a job, answered by the job itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import final

import torch

from roundelay.cores import all_threads, usable_cores
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch, split
from roundelay.guards.optimizer_checks import needs_whole
from roundelay.guards.watch import preserving_state
from roundelay.ir.graph import Graph, Profile
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.planner.draft_plan import PLAIN, draft_plan
from roundelay.planner.kept_bytes import SavedStorages
from roundelay.planner.mesh_signatures import MeshFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.source import Divisibility, Hardware, Memo
from roundelay.planner.stage_counts import default_workers as workers_on
from roundelay.planning.compile_stages import for_plan
from roundelay.planning.memory_report import held_by_optimizer
from roundelay.planning.num_micro_batches import EXAMINED_BATCHES, examined
from roundelay.planning.on_mesh import mesh_facts, with_softmaxes, without_writes_of
from roundelay.planning.profiling import profiled, saved_storages
from roundelay.planning.torch_scope import user_code
from roundelay.runtime.device import num_cuda_devices
from roundelay.runtime.loading.loader_probe import first_batch, first_batches
from roundelay.runtime.loading.prefetch import OnWait


@final
@dataclass(frozen=True, slots=True)
class Examined:
    """A job as the :class:`~roundelay.planner.source.Source` of its plans.

    Args:
        job: the job.
        captured: its model, on no mesh.
        seed: of the data.
        tell: called when waiting for the loader takes long.
        memo: what was made of its model.
    """

    job: Job
    captured: Captured
    seed: int
    tell: OnWait
    memo: Memo = field(default_factory=Memo, init=False, compare=False, repr=False)

    @property
    def graph(self) -> Graph:
        """Of the model."""
        return self.captured.graph

    @property
    def checkpointed(self) -> tuple[str, ...]:
        """Paths of modules that the model's code checkpoints itself."""
        return self.captured.checkpointed

    @property
    def state_bytes(self) -> Mapping[str, int] | None:
        """Of each parameter's optimizer state, by name."""
        draft = draft_plan(self.graph.fingerprint, PLAIN, 1, Choices())
        return self.memo.of("state bytes", lambda: held_by_optimizer(self.job, self.captured, draft))

    def untouched(self) -> AbstractContextManager[object]:
        """A block in which the model may be called: afterwards the job's state is as it was, and no hook has run."""
        return preserving_state(self.job, hooks=False)

    def sample(self, draft: Plan) -> Batch:
        """The first micro-batch of the size that will be trained on."""
        batch = first_batch(self.job.loader, self.seed, draft.deadline_s, self.tell)
        return split(batch, max(1, draft.batch_parts), self.graph.min_rows)[0]

    def divisibility(self, draft: Plan, parts: int) -> Divisibility:
        """Whether the first batches may be cut into so many parts."""
        with self.untouched():
            batches = first_batches(self.job.loader, self.seed, EXAMINED_BATCHES, draft.deadline_s, budget_s=1.0)
            return examined(self.captured, batches, parts)

    def lowered(self, draft: Plan) -> Examined:
        """The same of the model in a plan's precision."""
        return replace(self, captured=for_plan(self.captured, replace(draft, mesh={}, parameters={}, outputs={})))

    def profile(self, draft: Plan) -> tuple[Profile, str]:
        """Seconds of every operation on a micro-batch of the plan, and in words where they come from."""
        with self.untouched():
            return profiled(self.captured, self.sample(draft), draft.threads, draft.devices[0])

    def storages(self, draft: Plan) -> SavedStorages:
        """What the operations keep of a micro-batch of the plan."""
        with self.untouched(), user_code("counting what the operations keep of the first micro-batch"):
            return saved_storages(self.captured, self.sample(draft))

    def mesh_facts(self) -> MeshFacts:
        """What signatures are deduced from."""
        return mesh_facts(without_writes_of(self.captured))

    def written_out(self, names: Sequence[str]) -> MeshFacts:
        """The same of the model in which these softmaxes are written out."""
        return mesh_facts(with_softmaxes(without_writes_of(self.captured), names))

    def whole_states(self, dims: Mapping[str, int]) -> Mapping[str, str]:
        """Parameters whose optimizer state must be whole, with the reason."""
        return needs_whole(self.job, list(self.captured.model.named_parameters()), dict(dims))


def hardware_here() -> Hardware:
    """This host."""
    return Hardware(usable_cores(), all_threads(torch.get_num_threads), num_cuda_devices())


def default_workers(holders: int = 1, devices: str | None = None, transport: str = "memory") -> int:
    """The default number of workers of a replica on this host; see :func:`roundelay.planner.stage_counts`."""
    return workers_on(hardware_here(), holders, devices, transport)
