"""Transports: how messages and credits travel between workers.

`endpoint` is the interface. `memory` connects threads of one process, `shm` processes of one host, `gloo` processes
over torch.distributed, `nccl` processes with a GPU each. `delayed` wraps any of them and changes timing, never content.
"""
