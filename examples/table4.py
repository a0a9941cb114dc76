"""Data parallelism, then model parallelism, on two pairs of processes: the program of OneFlow's Table 4.

torchrun --nproc-per-node 4 examples/table4.py
"""

import torch

import roundelay
from roundelay import sbp

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
P0, P1 = roundelay.placement([0, 1]), roundelay.placement([2, 3])
A0 = roundelay.randn(4, 5, placement=P0, sbp=sbp.split(0))
B0 = roundelay.randn(5, 8, placement=P0, sbp=sbp.broadcast)
Y0 = torch.matmul(A0, B0)  # split(0): each has its rows
Y0 = Y0.to_global(placement=P1, sbp=sbp.broadcast)
B1 = roundelay.randn(8, 6, placement=P1, sbp=sbp.split(1))
Y2 = torch.matmul(Y0, B1)  # split(1): each has its columns
print(f"rank {torch.distributed.get_rank()}: {Y2}, here {tuple(Y2.to_local().shape)}")
torch.distributed.destroy_process_group()
