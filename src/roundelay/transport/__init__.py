"""How messages and credits travel between workers: one contract, and the ways to fulfil it.

`contract` says what an endpoint promises; `memory` hands over between threads of one process, `shm` between
processes of one host, `gloo` between processes through torch.distributed; `delayed` wraps any of them and changes the
timing, never the content.
"""
