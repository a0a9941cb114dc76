"""Names of the ways to break a run; see :mod:`roundelay.proof.tamper`. No torch is needed."""

from __future__ import annotations

from roundelay.errors import UsageError, did_you_mean

WAYS = ("stash", "s", "order", "rng", "drop-update")
"""Those that act in every plan."""

BOX, STALE_SHARD, ORDER = EXCHANGE_WAYS = ("box", "stale-shard", "exchange-order")
"""Those that act where several holders of a stage exchange something."""

STALE_GATHER = "stale-gather"
"""That acts where weights are gathered before each use."""

HOP, STALE_SUM, SUM_ORDER = SUM_WAYS = ("hop", "stale-sum", "sum-order")
"""Those that act in layouts of cyclic data parallelism."""

ALL_WAYS = (*WAYS, *EXCHANGE_WAYS, STALE_GATHER, *SUM_WAYS)
"""Every way."""


def check_tamper(tamper: str | None) -> None:
    """Refuse an unknown way to tamper; None is accepted.

    Raises:
        UsageError: the way is unknown.
    """
    if tamper is not None and tamper not in ALL_WAYS:
        near = did_you_mean(tamper, ALL_WAYS)
        known = "one of " + ", ".join(ALL_WAYS)
        raise UsageError("--tamper", got=repr(tamper), expected=known, remedy=near + "Choose one of these.")
