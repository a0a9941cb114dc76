"""Batches as loaders give them: leaves, rows, micro-batches."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roundelay.errors import JobError
from roundelay.frontend.batch import copy_batch, leaves, num_rows, replace, split, twice


class Pair(NamedTuple):
    """A batch with names."""

    x: Tensor
    y: Tensor


def nested(rows: int) -> dict[str, Any]:
    """A batch of every kind of container."""
    column = torch.arange(rows)
    return {
        "x": column.view(rows, 1).float(),
        "pair": Pair(column, column * 2),
        "list": [column * 3, {"deep": (column * 4, "text")}],
        "temperature": torch.tensor(0.5),
        "name": "text",
        "none": None,
    }


@given(rows=st.integers(1, 12), count=st.integers(1, 15))
def test_micro_batches_hold_the_rows_in_order_sizes_differing_by_at_most_one_larger_ones_first(
    rows: int, count: int
) -> None:
    parts = split({"x": torch.arange(rows), "y": torch.arange(rows) * 2.0}, count)
    sizes = [num_rows(part) for part in parts]
    assert len(parts) == min(rows, count)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert torch.cat([part["x"] for part in parts]).tolist() == list(range(rows))
    assert all(torch.equal(part["x"] * 2.0, part["y"]) for part in parts)


def test_every_container_keeps_its_kind_and_what_is_no_tensor_or_has_no_rows_goes_everywhere() -> None:
    parts = split(nested(5), 2)
    for part, column in zip(parts, (torch.arange(3), torch.arange(3, 5)), strict=True):
        assert type(part["pair"]) is Pair
        assert torch.equal(part["pair"].y, column * 2)
        assert type(part["list"]) is list
        assert torch.equal(part["list"][1]["deep"][0], column * 4)
        assert part["list"][1]["deep"][1] == part["name"] == "text"
        assert part["none"] is None
        assert part["temperature"].item() == 0.5
    assert split((torch.arange(4), [torch.arange(4)]), 4)[3][1][0].tolist() == [3]


@pytest.mark.parametrize("kind", [OrderedDict, UserDict])
def test_a_mapping_keeps_its_kind_and_the_given_one_stays_as_it_was(kind: type) -> None:
    batch = kind(x=torch.arange(4), y=torch.arange(4))
    parts = split(batch, 2)
    assert [type(part) for part in parts] == [kind, kind]
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert batch["x"].tolist() == [0, 1, 2, 3]


def test_what_is_as_long_as_the_batch_is_cut_with_it_and_nothing_else() -> None:
    batch = {
        "x": torch.arange(5),
        "texts": list("abcde"),
        "lengths": (1, 2, 3, 4, 5),
        "tokens": [[1], [2, 2], [3], [4], [5, 5, 5]],
        "array": np.arange(10).reshape(5, 2),
        "meta": {"ids": list("vwxyz"), "classes": ["cat", "dog"], "size": (3, 224)},
        "pair": [["p", "q"], torch.arange(5)],
        "point": Pair("x", "y"),  # type: ignore[arg-type]
        "name": "texts",
        "vector": np.arange(3),
        "number": np.array(2.0),
    }
    parts = split(batch, 2)
    assert [part["texts"] for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert [part["lengths"] for part in parts] == [(1, 2, 3), (4, 5)]
    assert [part["tokens"] for part in parts] == [[[1], [2, 2], [3]], [[4], [5, 5, 5]]]
    assert [part["array"].tolist() for part in parts] == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert [part["meta"]["ids"] for part in parts] == [["v", "w", "x"], ["y", "z"]]
    for part in parts:
        assert part["meta"]["classes"] == ["cat", "dog"]
        assert part["meta"]["size"] == (3, 224)
        assert part["pair"][0] == ["p", "q"]
        assert part["point"] == ("x", "y")
        assert part["name"] == "texts"
        assert part["vector"].tolist() == [0, 1, 2]
        assert part["number"] == 2.0


def test_a_list_beside_tensors_is_cut_also_where_the_batch_is_as_long_as_its_fields() -> None:
    parts = split([torch.arange(2), ["a", "b"]], 2)
    assert [(part[0].tolist(), part[1]) for part in parts] == [([0], ["a"]), ([1], ["b"])]


def test_a_single_row_is_doubled_with_its_texts() -> None:
    made = twice({"x": torch.ones(1, 2), "texts": ["a"], "array": np.ones((1, 2)), "size": (3, 4)})
    assert made["x"].shape == made["array"].shape == (2, 2)
    assert made["texts"] == ["a", "a"]
    assert made["size"] == (3, 4)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_is_refused_by_name(layout: torch.layout) -> None:
    with pytest.raises(JobError, match=r"batch field 'a.x'.*sparse.*to_dense"):
        num_rows({"a": {"x": torch.eye(4).to_sparse(layout=layout)}, "y": torch.zeros(4)})


def test_micro_batches_are_contiguous() -> None:
    (first, second) = split((torch.randn(6, 4).t(), torch.zeros(4)), 2)
    assert first[0].is_contiguous()
    assert second[0].is_contiguous()


def test_leaves_are_named_by_their_path() -> None:
    assert list(leaves(nested(2))) == ["x", "pair.0", "pair.1", "list.0", "list.1.deep.0", "temperature"]
    assert list(leaves((torch.zeros(1), {"a": torch.zeros(1)}))) == ["0", "1.a"]
    assert list(leaves({3: torch.zeros(1)})) == ["3"]


def test_replace_keeps_the_layout_and_tells_the_path_of_every_leaf() -> None:
    batch = nested(2)
    told = replace(batch, lambda path, _: path, lambda path, leaf: (path, leaf))
    assert told["list"][1]["deep"] == ("list.1.deep.0", ("list.1.deep.1", "text"))
    assert told["pair"] == Pair("pair.0", "pair.1")  # type: ignore[arg-type]
    assert told["none"] == ("none", None)
    assert replace(batch, lambda path, _: path)["name"] == "text"


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        ((torch.zeros(0, 3), torch.zeros(0)), r"\{'0': 0, '1': 0\}"),
        ({"x": torch.tensor(1.0)}, "none"),
        ({"x": [1, 2]}, "a dict without any tensor"),
        (object(), "a object without any tensor"),
    ],
)
def test_batches_without_a_number_of_rows_are_refused(batch: Any, got: str) -> None:
    with pytest.raises(JobError, match=got):
        num_rows(batch)


def test_a_copy_shares_nothing_with_the_batch_and_keeps_what_occurs_twice() -> None:
    x, array = torch.zeros(3), np.zeros(3)
    copy = copy_batch({"x": x, "again": [x], "array": array, "text": "text"})
    assert copy["x"] is copy["again"][0]
    copy["x"] += 1
    copy["array"] += 1
    assert x.sum() == array.sum() == 0
