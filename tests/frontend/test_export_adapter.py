"""The call's layout and the result's layout, taken apart and put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from roundelay.errors import JobError
from roundelay.frontend.export.export_adapter import CallShape, ExportAdapter, Opaque, OutputShape, default_inputs

ONE, TWO, THREE = torch.zeros(1), torch.zeros(2), torch.zeros(3)


def test_a_mapping_is_called_by_name_and_a_tuple_without_its_last() -> None:
    assert default_inputs({"a": ONE, "b": TWO}) == ((), {"a": ONE, "b": TWO})
    assert default_inputs((ONE, TWO, THREE)) == ((ONE, TWO), {})
    assert default_inputs([ONE, TWO]) == ((ONE,), {})


@pytest.mark.parametrize(
    ("batch", "got"), [((ONE,), "a tuple of 1"), (ONE, "a Tensor"), ("text", "a str"), ([], "a list of 0")]
)
def test_other_batches_need_a_function_that_says_how_to_call(batch: Any, got: str) -> None:
    with pytest.raises(JobError, match=rf"got {got}.*Job\(inputs"):
        default_inputs(batch)


def test_a_call_comes_back_with_other_tensors_in_its_places() -> None:
    args, kwargs = (ONE, 2, [TWO, None]), {"flag": True, "three": THREE}
    tensors, call = CallShape.flatten(args, kwargs)
    assert [t is u for t, u in zip(tensors, (ONE, TWO, THREE), strict=True)] == [True] * 3
    fresh = [tensor + 1 for tensor in tensors]
    again, named = call.unflatten(fresh)
    assert again[0] is fresh[0]
    assert again[1] == 2
    assert again[2][0] is fresh[1]
    assert again[2][1] is None
    assert named == {"flag": True, "three": fresh[2]}


@pytest.mark.parametrize(
    ("args", "kwargs", "same"),
    [
        ((THREE, 2), {"flag": True}, True),
        ((THREE, 3), {"flag": True}, False),
        ((THREE, 2), {"flag": None}, False),
        ((THREE, 2), {}, False),
        ((THREE, 2, ONE), {"flag": True}, False),
    ],
)
def test_calls_match_if_they_differ_in_tensors_only(args: Any, kwargs: Any, same: bool) -> None:
    _, call = CallShape.flatten((ONE, 2), {"flag": True})
    _, other = CallShape.flatten(args, kwargs)
    assert (other.spec == call.spec and other.differing(call) is None) == same


class Cache:
    """What export does not understand."""


def test_a_result_comes_back_with_opaque_leaves_where_no_tensor_can_travel() -> None:
    class Returns(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"x": x, "more": (x + 1, 3, None, Cache())}

    _, call = CallShape.flatten((ONE,), {})
    face = ExportAdapter(Returns(), call)
    assert face.seen.shape is None
    made = face(ONE)
    assert [t.item() for t in made] == [0, 1]
    shape = face.seen.shape
    assert shape is not None
    assert shape.num_tensors == 2
    result = shape.unflatten({0: "first", 1: "second"})
    assert result["x"] == "first"
    assert result["more"][:3] == ("second", 3, None)
    with pytest.raises(JobError, match=r"attribute 'keys' of an output of type Cache"):
        result["more"][3].keys()


def test_output_shape_counts_tensors_only() -> None:
    _, spec = pytree.tree_flatten((1, 2, 3))
    assert OutputShape(spec, {1: "text"}).unflatten({0: "a", 1: "b"}) == ("a", "text", "b")


USES: dict[str, Any] = {
    "attribute": lambda it: it.mean(),
    "operand": lambda it: torch.ones(2) * it,
    "left operand": lambda it: it / torch.ones(2),
    "argument": lambda it: torch.nn.functional.mse_loss(torch.ones(2), it),
    "keyword": lambda it: torch.add(torch.ones(2), other=it),
    "in a list": lambda it: torch.cat([torch.ones(2), it]),
    "index": lambda it: it[0],
    "truth": lambda it: 1 if it else 0,
    "number": lambda it: float(it),
    "length": lambda it: len(it),
    "comparison": lambda it: it == 3,
    "loop": lambda it: list(it),
    "power": lambda it: it**2,
    "shape": lambda it: it.shape,
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_what_did_not_travel_is_told_by_name(use: str) -> None:
    with pytest.raises(JobError, match=r"batch field 'labels'"):
        USES[use](Opaque("batch field 'labels'"))


def test_what_did_not_travel_may_be_carried_about() -> None:
    stand_in = Opaque("output 0")
    assert stand_in is not None
    assert {"a": stand_in}["a"] is stand_in
    assert isinstance(stand_in, Opaque)
