"""Tensors that lie on several processes, by hand and at once.

Every process runs the same program, under torchrun; operators on global tensors are torch's own, and are carried out by
the rules for signatures that the compiler uses::

    P0, P1 = roundelay.placement([0, 1]), roundelay.placement([2, 3])
    A0 = roundelay.randn(4, 5, placement=P0, sbp=sbp.split(0))
    B0 = roundelay.randn(5, 8, placement=P0, sbp=sbp.broadcast)
    Y0 = torch.matmul(A0, B0)                                   # split(0) on P0
    Y0 = Y0.to_global(placement=P1, sbp=sbp.broadcast)
"""

from roundelay.global_tensor import sbp
from roundelay.global_tensor.dtensor import from_dtensor, to_dtensor
from roundelay.global_tensor.factories import from_local, ones, rand, randn, tensor, zeros
from roundelay.global_tensor.placement import Placement, placement
from roundelay.global_tensor.tensor import GlobalTensor

__all__ = [
    "GlobalTensor",
    "Placement",
    "from_dtensor",
    "from_local",
    "ones",
    "placement",
    "rand",
    "randn",
    "sbp",
    "tensor",
    "to_dtensor",
    "zeros",
]
