"""How messages and credits travel between workers: one contract, and the ways to fulfil it.

`contract` says what an endpoint promises; `memory` hands over between threads of one process, `gloo` between
processes through torch.distributed; `delayed` wraps either and changes the timing, never the content.
"""
