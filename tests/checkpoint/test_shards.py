"""A parameter may lie in parts at several holders: joined, it is whole to the last bit, or it is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundelay.checkpoint.checkpoint import load
from roundelay.checkpoint.held_state import HeldState, disagreement, encode
from roundelay.checkpoint.shards import Ranges, Shard, join_shards, missing_ranges, whole_ranges
from roundelay.errors import CheckpointError, InternalError
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.processes.worker_messages import Report
from roundelay.runtime.state_reports import StateReport
from roundelay.session.state_gather import CheckpointParts, Snapshot, StateGatherer
from tests.checkpoint.test_checkpoint import checkpoint, edited, same
from tests.checkpoint.whole import complete


def piece(tensor: torch.Tensor, ranges: Ranges) -> Shard:
    """The part of a tensor that lies in these ranges."""
    return Shard(ranges, tensor[tuple(slice(begin, end) for begin, end in ranges)].clone())


def grid(shape: Sequence[int], borders: Sequence[Sequence[int]]) -> list[Ranges]:
    """The cells into which borders within each dimension cut a tensor."""
    cuts = [itertools.pairwise(sorted({0, size, *own})) for size, own in zip(shape, borders, strict=True)]
    return list(itertools.product(*cuts))


@given(
    shape=st.lists(st.integers(1, 5), max_size=3),
    borders=st.lists(st.lists(st.integers(1, 4), max_size=2), min_size=3, max_size=3),
    data=st.data(),
)
def test_every_cut_joins_to_the_whole_and_without_any_part_it_is_incomplete(
    shape: list[int], borders: list[list[int]], data: st.DataObject
) -> None:
    whole = torch.arange(float(math.prod(shape))).reshape(shape)
    inside = [[b for b in own if b < size] for size, own in zip(shape, borders, strict=False)]
    cells = data.draw(st.permutations(grid(shape, inside)))
    assert missing_ranges(shape, cells) is None
    assert torch.equal(join_shards(shape, [piece(whole, ranges) for ranges in cells]), whole)
    lost = data.draw(st.sampled_from(cells))
    assert missing_ranges(shape, [cell for cell in cells if cell != lost]) == lost or not shape


def test_overlapping_parts_cover_and_the_first_counts() -> None:
    first, second = ((0, 3), (0, 2)), ((1, 4), (0, 2))
    assert missing_ranges((4, 2), [first, second]) is None
    assert missing_ranges((5, 2), [first, second]) == ((4, 5), (0, 2))
    joined = join_shards((4, 2), [Shard(first, torch.zeros(3, 2)), Shard(second, torch.ones(3, 2))])
    assert joined.tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]


def test_nothing_and_a_scalar_are_covered_by_their_one_shard_only() -> None:
    assert missing_ranges((), [()]) is None
    assert missing_ranges((), []) == ()
    assert missing_ranges((0, 3), [whole_ranges((0, 3))]) is None
    assert missing_ranges((0, 3), []) == ((0, 0), (0, 3))


WHOLE = torch.arange(12.0).reshape(4, 3)


def half(stage: int, ranges: Ranges, *, moment: float = 0.5) -> HeldState:
    """A holder of some rows or columns of ``w``, with state of the same shape, and a step that is not sharded."""
    shard = piece(WHOLE, ranges)
    state = {"exp_avg": shard.tensor + moment, "step": torch.tensor(3.0), "kind": "mine"}
    return HeldState(stage, {"w": shard}, {}, {"w": state})


HALVES = {
    "rows": [((0, 1), (0, 3)), ((1, 4), (0, 3))],
    "columns": [((0, 4), (0, 2)), ((0, 4), (2, 3))],
    "both, with an overlap": [((0, 3), (0, 3)), ((2, 4), (0, 3))],
    "twice the whole": [((0, 4), (0, 3))] * 2,
}


@pytest.mark.parametrize("halves", HALVES)
def test_a_checkpoint_of_two_holders_loads_as_the_whole(tmp_path: Path, halves: str) -> None:
    states = [half(stage, ranges) for stage, ranges in enumerate(HALVES[halves])]
    complete(tmp_path, checkpoint(4, parameters={"w": WHOLE}), states, {})
    assert len(list(tmp_path.glob("stage-*.safetensors"))) == 2
    found = load(tmp_path)
    assert same(found.parameters["w"], WHOLE)
    assert same(found.optimizer["w"]["exp_avg"], WHOLE + 0.5)
    assert same(found.optimizer["w"]["step"], torch.tensor(3.0))
    assert found.optimizer["w"]["kind"] == "mine"


def test_a_checkpoint_without_every_element_is_not_completed_and_not_loaded(tmp_path: Path) -> None:
    states = [half(stage, ranges) for stage, ranges in enumerate(HALVES["rows"])]
    with pytest.raises(InternalError, match=r"no holder of parameter 'w'\[1:4, 0:3\]"):
        complete(tmp_path, checkpoint(4, parameters={"w": WHOLE}), states[:1], {})
    complete(tmp_path, checkpoint(4, parameters={"w": WHOLE}), states, {})
    edited(tmp_path, lambda document: document["content"]["holders"].pop(0), seal=True)
    with pytest.raises(CheckpointError, match=r"no file with parameter 'w'\[0:1, 0:3\]"):
        load(tmp_path)


def test_a_manifest_names_no_file_elsewhere(tmp_path: Path) -> None:
    complete(tmp_path, checkpoint(4, parameters={"w": WHOLE}), [half(0, HALVES["twice the whole"][0])], {})
    edited(tmp_path, lambda document: document["content"]["holders"][0].update(file="../other.safetensors"), seal=True)
    with pytest.raises(CheckpointError, match="does not name the files"):
        load(tmp_path)


# What the launcher gathers


def gathered(states: Sequence[HeldState], *, compares: bool = True, shape: Sequence[int] = (4, 3)) -> Snapshot:
    """The snapshot that comes of the reports of these holders, the last of which arrives first."""
    snapshots: list[tuple[Snapshot, CheckpointParts]] = []
    gatherer = StateGatherer(
        len(states), {"w": shape}, lambda snapshot, parts: snapshots.append((snapshot, parts)), compares=compares
    )
    for worker, state in reversed(list(enumerate(states))):
        assert snapshots == []
        table, tensors = encode(state)
        header = MicroBatch(7, 3, 0, 1, 1, 1, 0, 1, 1).numbers()
        report = StateReport(header, state.stage, table, gathered=True)
        gatherer.take(Report("state", worker, msgspec.to_builtins(report), tensors))
    ((snapshot, parts),) = snapshots
    assert (parts.stored, parts.unstored, parts.unwritten) == ((), (), "")
    return snapshot


@pytest.mark.parametrize("halves", HALVES)
def test_a_snapshot_of_two_holders_is_the_whole(halves: str) -> None:
    snapshot = gathered([half(0, ranges) for ranges in HALVES[halves]])
    assert same(snapshot.parameters["w"], WHOLE)
    assert same(snapshot.optimizer["w"]["exp_avg"], WHOLE + 0.5)


def test_a_snapshot_without_every_element_is_refused() -> None:
    with pytest.raises(InternalError, match=r"no holder of parameter 'w'\[1:4, 0:3\]"):
        gathered([half(0, HALVES["rows"][0])] * 2)


def test_holders_that_disagree_are_found_where_they_are_compared_and_the_first_counts_elsewhere() -> None:
    one, other = (half(0, ranges) for ranges in HALVES["both, with an overlap"])
    assert disagreement([one, other]) == ""
    changed = other.parameters["w"].tensor.clone()
    changed[0, 0] += 1
    other = replace(other, parameters={"w": other.parameters["w"]._replace(tensor=changed)})
    assert disagreement([one, other]) == "parameter 'w'"
    with pytest.raises(InternalError, match="different values of parameter 'w'"):
        gathered([one, other])
    assert same(gathered([one, other], compares=False).parameters["w"], WHOLE)


def test_holders_of_a_not_a_number_agree_if_it_is_the_same() -> None:
    one = replace(half(0, HALVES["rows"][0]), buffers={"b": torch.tensor(math.nan)})
    assert disagreement([one, replace(one, buffers={"b": torch.tensor(math.nan)})]) == ""
    assert disagreement([one, replace(one, buffers={"b": -torch.tensor(math.nan)})]) == "buffer 'b'"
