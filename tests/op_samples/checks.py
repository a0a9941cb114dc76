"""PyTorch's own samples of its operators, on tensors that lie on several processes in every way.

A check takes one sample, lets one of its tensors lie in one way and all others be broadcast, and compares results and
gradients with those of the plain operator. ``python -m tests.op_samples`` makes all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

import roundelay
from roundelay.errors import RoundelayError
from roundelay.global_tensor.tensor import GlobalTensor
from roundelay.ir.sbp import B, P, Signature, Split
from tests.op_samples.simulated import Alone, Ranks

EQUAL, REFUSED, WRONG, INTERNAL, RANDOM = "equal", "refused", "wrong", "internal", "random"
SAMPLES = 4
"""Of each operator, spread over all that there are."""

SKIPPED = (
    *("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided", "bernoulli"),
    *("rand_like", "randn_like", "randint_like", "randint", "randn", "multinomial", "uniform", "exponential"),
    *("geometric", "log_normal", "normal", "cauchy", "nn.functional.dropout", "nn.functional.dropout2d"),
    *("nn.functional.dropout3d", "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout"),
    *("nn.functional.feature_alpha_dropout_with_train", "svd_lowrank", "pca_lowrank", "resize_", "resize_as_"),
    *("nn.functional.rrelu", "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d"),
    *("nn.functional.multi_head_attention_forward", "to_sparse", "item", "equal", "as_strided"),
)
"""They draw, or their results are not determined, or are no tensors of torch's own layout."""


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        op: name of the operator, with its variant.
        sample: number of its sample.
        leaf: number of the tensor in the sample that lies in another way.
        signature: how.
        workers: on how many.
        dtype: of the sample.
    """

    op: str
    sample: int
    leaf: int
    signature: Signature
    workers: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.op} sample {self.sample} tensor {self.leaf} {self.signature} x{self.workers} {kind}"


@dataclass(frozen=True)
class Sample:
    """A call of an operator.

    Args:
        call: the operator.
        leaves: all arguments.
        spec: how they are put together.
        differentiable: whether gradients are compared.
    """

    call: Any
    leaves: list[Any]
    spec: Any
    differentiable: bool

    def on(self, leaves: Sequence[Any]) -> Any:
        """The operator's result on these leaves."""
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return self.call(*args, **kwargs)

    @property
    def tensors(self) -> list[int]:
        """Numbers of the leaves that are tensors."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]


def operators() -> Iterator[Any]:
    """Those of torch whose samples say what they give."""
    for op in op_db:
        if op.name not in SKIPPED:
            yield op


def name_of(op: Any) -> str:
    """With its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def samples_of(op: Any, dtype: torch.dtype, most: int = SAMPLES) -> dict[int, Sample]:
    """Some of an operator's samples, by number; those that plain torch cannot compute are left out."""
    if dtype not in op.supported_dtypes("cpu"):
        return {}
    torch.manual_seed(0)
    made = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    numbers = sorted({round(i * (len(made) - 1) / max(1, most - 1)) for i in range(most)}) if made else []
    gradients = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    samples = {}
    for number in numbers:
        one = made[number]
        leaves, spec = tree_flatten(((one.input, *one.args), one.kwargs))
        if all(isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided for leaf in leaves if _is_tensor(leaf)):
            samples[number] = Sample(op.op, leaves, spec, gradients)
    return samples


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def checks_of(op: Any, sample: int, given: Sample, workers: int, dtype: torch.dtype) -> Iterator[Check]:
    """Every tensor of a sample in every way."""
    for leaf in given.tensors:
        tensor = given.leaves[leaf]
        ways: list[Signature] = [Split(dim) for dim in range(tensor.ndim)]
        if tensor.dtype is not torch.bool:
            ways.append(P)
        yield from (Check(name_of(op), sample, leaf, way, workers, dtype) for way in ways)


def outcome(check: Check, given: Sample, ranks: Ranks) -> tuple[str, str]:
    """What comes of a check, and why."""
    try:
        wanted, wanted_gradients = _computed(given, _plain(given))
        again, _ = _computed(given, _plain(given))
    except Exception as error:  # the sample is none, or has no gradient
        return RANDOM, str(error)
    if not all(_same(a, b) for a, b in zip(wanted, again, strict=True)):
        return RANDOM, "it gives something else at each call"
    found = ranks.run(lambda: _whole(*_computed(given, _laid(given, check))))
    errors = [one for one in found if isinstance(one, Exception) and not isinstance(one, Alone)]
    if errors:
        error = errors[0]
        refusal = isinstance(error, RoundelayError) and len(errors) == check.workers
        kinds = " and ".join(sorted({type(e).__name__ for e in errors}))
        return (REFUSED if refusal else INTERNAL), f"{kinds} on {len(errors)}: {' '.join(str(error).split())[:300]}"
    for rank, one in enumerate(found):
        if isinstance(one, Alone):
            return INTERNAL, f"rank {rank} waits for ever"
        results, gradients = one
        for what, ours, theirs in (("result", results, wanted), ("gradient", gradients, wanted_gradients)):
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                if not _same(a, b):
                    return WRONG, f"{what} {i} on rank {rank}"
    return EQUAL, ""


def _plain(given: Sample) -> list[Any]:
    leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in given.leaves]
    return _requiring(given, leaves)


def _laid(given: Sample, check: Check) -> list[Any]:
    on = roundelay.placement(range(check.workers))
    leaves = [
        roundelay.tensor(leaf.detach().clone(), placement=on, sbp=check.signature if i == check.leaf else B)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for i, leaf in enumerate(given.leaves)
    ]
    return _requiring(given, leaves)


def _requiring(given: Sample, leaves: list[Any]) -> list[Any]:
    for leaf in leaves if given.differentiable else ():
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            leaf.requires_grad_(True)
    return leaves


def _computed(given: Sample, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """Results and gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = tree_flatten(given.on(leaves))[0]
        roots = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        gradients: Sequence[Any] = ()
        if roots and inputs:
            seeds = [_seed(root) for root in roots]
            gradients = torch.autograd.grad(roots, inputs, seeds, allow_unused=True)
    return list(results), list(gradients)


def _seed(root: torch.Tensor) -> torch.Tensor:
    """Numbers that are not alike, and the same whichever way the result lies."""
    draws = torch.Generator().manual_seed(1)
    seed = torch.randn(root.shape, generator=draws, dtype=root.dtype)
    return roundelay.tensor(seed, placement=root.placement) if isinstance(root, GlobalTensor) else seed


def _whole(results: list[Any], gradients: list[Any]) -> tuple[list[Any], list[Any]]:
    full = [[one.full() if isinstance(one, GlobalTensor) else one for one in own] for own in (results, gradients)]
    return full[0], full[1]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return False
    if not isinstance(a, torch.Tensor):
        return bool(a == b) or (a != a and b != b)
    a, b = a.detach(), b.detach()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return torch.allclose(a, b, rtol=1e-6, atol=1e-8, equal_nan=True)
    return torch.equal(a, b)
