"""What a planner must know of a job, as data: collected once where there is torch, and enough to price any candidate.

Seconds and bytes are known at a few numbers of rows, and taken to be linear in between. Of what was not examined, the
nearest that was stands for it: into how many parts a batch may be cut, how softmaxes over a split are written, and
numbers of intra-op threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, final

import msgspec

from roundelay.errors import PlanError
from roundelay.ir.deduction import ShardedOp
from roundelay.ir.device_names import CPU
from roundelay.ir.graph import Graph, Profile
from roundelay.ir.op_form import Dims, OpForm, Varying, number_of
from roundelay.ir.plan import Plan
from roundelay.lower.dataflow import sample_micro_batches
from roundelay.planner.kept_bytes import SavedStorages
from roundelay.planner.mesh_signatures import MeshFacts
from roundelay.planner.source import Divisibility, Memo


@dataclass(frozen=True, slots=True)
class AtRows:
    """What was measured on a micro-batch of so many rows, with so many intra-op threads."""

    rows: int
    threads: int
    profile: Profile


@final
@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A job as the :class:`~roundelay.planner.source.Source` of its plans, of data alone.

    Args:
        precision: of the graph.
        device: kind of device on which the operations were measured: ``cpu`` or ``cuda``.
        graph: of the model.
        checkpointed: paths of modules that the model's code checkpoints itself.
        mesh: what signatures are deduced from.
        rewritten: the same with softmaxes written out, by their names with commas between them.
        divisible: whether the first batches may be cut, by the number of parts.
        measured: seconds, by threads and rows, the fewest first.
        saved: what the operations keep of the most rows.
        unused: names of trained parameters that get no gradient.
        whole: parameters whose optimizer state must be whole, with the reason.
        state_bytes: of each parameter's optimizer state; None where the optimizer does not tell.
        read_row_s: seconds of the loader for a row.
    """

    precision: str
    device: str = CPU
    graph: Graph
    checkpointed: tuple[str, ...]
    mesh: MeshFacts
    rewritten: Mapping[str, MeshFacts] = field(hash=False)
    divisible: Mapping[int, Divisibility] = field(hash=False)
    measured: tuple[AtRows, ...]
    saved: SavedStorages
    unused: tuple[str, ...]
    whole: Mapping[str, str] = field(hash=False)
    state_bytes: Mapping[str, int] | None = field(hash=False, default=None)
    read_row_s: float = 0.0

    @cached_property
    def memo(self) -> Memo:
        """What was made of them."""
        return Memo()

    def divisibility(self, draft: Plan, parts: int) -> Divisibility:
        """Whether the first batches may be cut into so many parts, or into the nearest number that was examined."""
        if not self.divisible:
            raise _missing("whether batches may be cut", f"into {parts} parts")
        nearest = min(self.divisible, key=lambda number: (abs(number - parts), number))
        return replace(self.divisible[nearest], run=max(1, min(parts, self.graph.sample_rows // self.graph.min_rows)))

    def lowered(self, draft: Plan) -> ModelFacts:
        """The same, if they were collected in the plan's precision."""
        if draft.precision != self.precision:
            raise _missing("the model's precision", draft.precision)
        return self

    def rows(self, draft: Plan) -> int:
        """Rows of a micro-batch of the plan."""
        return self.rows_of(draft.batch_parts)

    def rows_of(self, parts: int) -> int:
        """Rows of one of so many parts of a batch."""
        return -(-self.graph.sample_rows // sample_micro_batches(self.graph, max(1, parts)))

    def profile(self, draft: Plan) -> tuple[Profile, str]:
        """Seconds of every operation on a micro-batch of the plan."""
        known = dict.fromkeys(str(one.rows) for one in self._on(draft.threads))
        return self.profile_at(self.rows(draft), draft.threads), f"measured on {', '.join(known)} rows"

    def profile_at(self, rows: int, threads: int) -> Profile:
        """Seconds of every operation on so many rows with so many intra-op threads."""
        return self.memo.of(("profile", rows, threads), lambda: self._profile(rows, threads))

    def _profile(self, rows: int, threads: int) -> Profile:
        own = self._on(threads)
        between = [*pairwise(own)] or [(own[0], own[0])]
        first, last = next((pair for pair in between if rows <= pair[1].rows), between[-1])
        share = (rows - first.rows) / (last.rows - first.rows) if last.rows > first.rows else 0.0
        pairs = zip(_columns(first.profile), _columns(last.profile), strict=True)
        return Profile(*(tuple(_between(a, b, share) for a, b in zip(*pair, strict=True)) for pair in pairs))

    def _on(self, threads: int) -> list[AtRows]:
        """What was measured with the nearest number of threads."""
        nearest = min({one.threads for one in self.measured}, key=lambda number: (abs(number - threads), number))
        return [one for one in self.measured if one.threads == nearest]

    @property
    def seconds(self) -> Mapping[int, float]:
        """Of a forward and a backward of the most rows, by number of threads."""
        whole = {one.threads: one.profile for one in self.measured if one.rows == self.measured[-1].rows}
        return {count: sum(own.forward_s) + sum(own.backward_s) for count, own in whole.items()}

    @property
    def speedup(self) -> float:
        """How many times as fast the most threads are as the fewest."""
        times = self.seconds
        return times[min(times)] / times[max(times)]

    def measured_with(self, threads: int) -> ModelFacts:
        """The same, of what was measured with the nearest number of threads alone: speeds of workers are beside it."""
        return replace(self, measured=tuple(self._on(threads)))

    def storages(self, draft: Plan) -> SavedStorages:
        """What the operations keep of a micro-batch of the plan."""
        rows, whole = self.rows(draft), self.measured[-1].rows
        return replace(self.saved, num_bytes=tuple([size * rows // whole for size in self.saved.num_bytes]))

    def mesh_facts(self) -> MeshFacts:
        """What signatures are deduced from."""
        return self.mesh

    def written_out(self, names: Sequence[str]) -> MeshFacts:
        """The same of the model in which these softmaxes are written out."""
        if (found := self.rewritten.get(",".join(names))) is None:
            raise _missing("the model with softmaxes over a split written out", ", ".join(names))
        return found

    def whole_states(self, dims: Mapping[str, int]) -> Mapping[str, str]:
        """Parameters whose optimizer state must be whole, with the reason."""
        return {name: why for name, why in self.whole.items() if name in dims}

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(data: bytes) -> ModelFacts:
        """Those that :meth:`encode` has written."""
        read = msgspec.json.decode(data, type=ModelFacts)
        return replace(
            read, mesh=plain_mesh(read.mesh), rewritten={n: plain_mesh(m) for n, m in read.rewritten.items()}
        )


def _missing(what: str, got: str) -> PlanError:
    return PlanError(
        f"the facts of the model: {what}",
        got=got,
        expected="one that was looked at when they were collected",
        remedy="Collect them with it, or plan with the job.",
    )


def _columns(profile: Profile) -> tuple[Sequence[float], ...]:
    return profile.forward_s, profile.backward_s, profile.update_s, profile.add_s


def _between(first: float, last: float, share: float) -> float:
    """What is linear between two measurements, and beyond them no less than nothing."""
    return max(0.0, first + (last - first) * share)


def plain_mesh(mesh: MeshFacts) -> MeshFacts:
    """The same with sizes that vary with the batch as texts."""

    def plain(dims: Dims) -> Dims:
        return tuple([tuple([(label, _plain(size)) for label, size in factors]) for factors in dims])

    def of_form(form: OpForm) -> OpForm:
        args = {name: plain(dims) for name, dims in form.args.items()}
        return replace(form, args=args, results=tuple(map(plain, form.results)))

    ops: list[ShardedOp] = [replace(op, form=of_form(op.form)) for op in mesh.ops]
    return replace(mesh, ops=tuple(ops))


def _plain(size: Any) -> int | Varying:
    """A size as a number, or as one that may vary; torch's and JSON's own forms of the latter included."""
    if isinstance(size, int | Varying):
        return size
    return Varying(**size) if isinstance(size, dict) else Varying(str(size), number_of(size))
