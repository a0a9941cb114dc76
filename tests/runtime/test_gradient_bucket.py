"""The flat tensors in which gradients are exchanged: nothing is lost, and kernels find what they would find anyway."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import InternalError
from roundelay.ir import bucket as buckets
from roundelay.runtime.gradient_bucket import ALIGNMENT, GradientBucket

SHAPES = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from([torch.float32, torch.float64])))


@given(SHAPES, st.integers(1, 400), st.floats(0, 9))
def test_what_is_packed_comes_out_again(
    shapes: list[tuple[list[int], torch.dtype]], largest: int, count: float
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(buckets, "LARGEST", largest)
        named = {f"w{i}": torch.randn(shape, dtype=dtype) for i, (shape, dtype) in enumerate(shapes)}
        bucket = GradientBucket.of(named.items())
        parts = bucket.pack(named, count)
        assert [part.numel() for part in parts] == list(bucket.elements)
        assert [part.dtype for part in parts] == [*bucket.dtypes, torch.float64]
        assert all(len(own) == 1 or part.nbytes <= largest for part, own in zip(parts, bucket.names, strict=False))
        found, counted = bucket.unpack(parts)
        assert counted == count
        assert found.keys() == named.keys()
        for name, gradient in found.items():
            assert torch.equal(gradient, named[name])
            assert gradient.dtype == named[name].dtype
            assert gradient.is_contiguous()
            assert gradient.data_ptr() % ALIGNMENT == 0


def test_a_gradient_that_is_not_planned_or_missing_is_an_error() -> None:
    bucket = GradientBucket.of({"a": torch.ones(2), "b": torch.ones(3)}.items())
    with pytest.raises(InternalError, match="got no gradient of b"):
        bucket.pack({"a": torch.ones(2)}, 0.0)
    with pytest.raises(InternalError, match="got a gradient of c"):
        bucket.pack({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, 0.0)
    with pytest.raises(InternalError, match="got no gradient of a, b"):
        bucket.pack({}, 0.0)
