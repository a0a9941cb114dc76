"""The processes on which a global tensor lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from roundelay.errors import UsageError


@dataclass(frozen=True, slots=True)
class Placement:
    """Processes, by their ranks in the default process group.

    Args:
        ranks: in the order in which they have the parts of a tensor.
    """

    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)

    @property
    def position(self) -> int | None:
        """Which of them this process is; None if it is none."""
        return dict(zip(self.ranks, range(self.size), strict=True)).get(dist.get_rank())

    def __str__(self) -> str:
        return f"ranks {', '.join(map(str, self.ranks))}"


def placement(ranks: Sequence[int]) -> Placement:
    """The processes of these ranks.

    Raises:
        UsageError: there is no process group, or there are no such ranks, or one twice.
    """
    if not dist.is_initialized():
        raise UsageError(
            "a placement",
            got="a program without a process group",
            expected="torch.distributed.init_process_group() before, under torchrun",
            remedy="Call it first.",
        )
    named = tuple(ranks)
    if not named or len(set(named)) < len(named) or not set(named) <= set(range(dist.get_world_size())):
        raise UsageError(
            "a placement",
            got=f"the ranks {list(named)}",
            expected=f"different ones from 0 to {dist.get_world_size() - 1}",
            remedy="Correct the ranks.",
        )
    return Placement(named)
