"""What a machine that has joined offers, and the cluster that a host makes of all offers before it plans."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, final

import msgspec
import torch
from msgspec import Meta
from msgspec.structs import replace

from roundelay.cores import all_threads, core_quota, usable_cores
from roundelay.errors import UsageError
from roundelay.lower.validate_plan import MOST_THREADS
from roundelay.observe.arithmetic import arithmetic
from roundelay.observe.machine_probe import probe_s
from roundelay.planner.cluster import Cluster, ClusterLink, ClusterLinks, ClusterWorker
from roundelay.trust.invitation import is_host

OFFER, VERDICT = "offer", "verdict"
"""Names of what a machine says of itself, and of what the host answers: nothing, or why it is refused."""

ENDED = "it has ended before the run began"
"""Verdict of a host that ends while it waits."""

PROBE, PROBE_BYTES = "probe", 6 * 2**20
"""Name and size of what is sent to a machine to measure its link."""

MOST_SPEED = 1e3
"""Most times that a machine may say to be as fast or as slow as the host."""

TOLD = 1.1
"""From what gain of the host's threads on they tell how much a model gains of threads."""


@final
class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a machine says of itself.

    Args:
        arithmetic: as of :func:`roundelay.observe.arithmetic.arithmetic`.
        machine: a digest by which several processes of one machine, under one quota of its cores, know that they are.
        cores: on which its processes may compute.
        threads: intra-op ones of plain PyTorch in one process.
        probe_s: seconds of a fixed piece of work with one thread.
        probe_all_s: with all of them.
        memory_bytes: that its part may need.
        rtt_s: seconds of a message to the host and back.
        bytes_per_s: from the host.
        address: where others reach it.
    """

    arithmetic: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    machine: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    cores: Annotated[int, Meta(ge=1, le=1 << 16)]
    threads: Annotated[int, Meta(ge=1, le=MOST_THREADS)]
    probe_s: Annotated[float, Meta(gt=0.0, lt=1e4)]
    probe_all_s: Annotated[float, Meta(gt=0.0, lt=1e4)]
    memory_bytes: Annotated[int, Meta(ge=0, lt=1 << 60)]
    rtt_s: Annotated[float, Meta(ge=0.0, lt=1e3)] = 0.0
    bytes_per_s: Annotated[float, Meta(gt=0.0, lt=1e15)] = 1e9
    address: tuple[Annotated[str, Meta(max_length=253)], Annotated[int, Meta(ge=0, lt=2**16)]] = ("", 0)

    def text(self) -> str:
        """As text."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def parse(text: str, name: str) -> Offer:
        """The offer of a machine.

        Raises:
            UsageError: it is none.
        """
        try:
            offer = msgspec.json.decode(text, type=Offer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _no_offer(name, str(error)) from error
        if offer.address[0] and not is_host(offer.address[0]):
            raise _no_offer(name, f"{offer.address[0]!r} as its address")
        return offer


def _no_offer(name: str, got: str) -> UsageError:
    remedy = "Check that it runs the same version of Roundelay."
    return UsageError(f"offer of {name}", got=got, expected="what it says of itself", remedy=remedy)


def own_offer(
    memory_bytes: int, rtt_s: float = 0.0, bytes_per_s: float = 1e9, address: tuple[str, int] = ("", 0)
) -> Offer:
    """What this machine offers.

    Args:
        memory_bytes: that its part may need.
        rtt_s: seconds of a message to the host and back.
        bytes_per_s: from the host.
        address: where others reach it.
    """
    threads = all_threads(torch.get_num_threads)
    seconds = probe_s(1), probe_s(threads)
    return Offer(arithmetic(), _machine(), usable_cores(), threads, *seconds, memory_bytes, rtt_s, bytes_per_s, address)


def refusal(own: Offer, other: Offer) -> str:
    """Why the host refuses a machine; empty if it does not."""
    if own.arithmetic != other.arithmetic:
        return (
            f"another arithmetic ({other.arithmetic}, the host has {own.arithmetic}): the last bits would differ; "
            "start the host anew, and join, with --arithmetic avx2 on all machines"
        )
    return ""


def cluster_of(offers: Sequence[Offer], threads: int | None = None, speedup: float = 1.0) -> Cluster:
    """The cluster of machines, in the order of the stages: that of their workers' numbers.

    Each computes with its own threads; processes of one machine share them, and are equally fast: what they measured
    differs by what the others did meanwhile. More threads help the model as they help the probe, but for the share of
    its work, by Amdahl's law, for which they do not help it on the host.

    Args:
        offers: the host's, and then those of the others.
        threads: of each worker; None: all that its machine has for it.
        speedup: how many times as fast the host computes the model with all its threads as with one.
    """
    sharing = Counter([one.machine for one in offers])
    counts = [threads or max(1, one.threads // sharing[one.machine]) for one in offers]
    used = Counter[str]()
    for one, count in zip(offers, counts, strict=True):
        used[one.machine] += count
    best = {name: _best([one for one in offers if one.machine == name]) for name in sharing}
    share = _shared_out(speedup, _gain(offers[0]))
    times = [
        _seconds(best[one.machine], count * min(1.0, one.cores / used[one.machine]), share)
        for one, count in zip(offers, counts, strict=True)
    ]
    workers = tuple(
        ClusterWorker(
            f"w{k}",
            k,
            round(min(MOST_SPEED, max(1 / MOST_SPEED, times[0] / times[k])), 3),
            float(one.memory_bytes),
            one.machine,
            counts[k],
        )
        for k, one in enumerate(offers)
    )
    slowest = ClusterLink(
        latency_s=round(max(one.rtt_s for one in offers[1:]) / 2, 6),
        bytes_per_s=float(round(min(one.bytes_per_s for one in offers[1:]))),
    )
    return Cluster(workers=workers, links=ClusterLinks(within=slowest, between=slowest), ordered=True)


def _best(offers: Sequence[Offer]) -> Offer:
    """What the processes of one machine have found of it: the one with most threads, with the shortest times."""
    most = max(offers, key=lambda one: one.threads)
    alike = [one.probe_all_s for one in offers if one.threads == most.threads]
    return replace(most, probe_s=min(one.probe_s for one in offers), probe_all_s=min(alike))


def _gain(one: Offer) -> float:
    """How many times as fast a machine works at the probe with all its threads as with one."""
    return max(1.0, one.probe_s / one.probe_all_s)


def _shared_out(speedup: float, gain: float) -> float:
    """The share of a model's work that threads divide among them; 1 where the host's threads do not tell."""
    return 1.0 if gain < TOLD else min(1.0, max(0.0, (1 - 1 / speedup) / (1 - 1 / gain)))


def _seconds(one: Offer, cores: float, share: float) -> float:
    """Seconds of a model, of which the probe on one thread is the unit, on so many of a machine's cores."""
    part = (min(cores, one.threads) - 1) / max(1, one.threads - 1)
    return one.probe_s / cores if cores < 1 else one.probe_s * (1 - share + share / (1 + (_gain(one) - 1) * part))


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = b""
    return hashlib.sha256(b"roundelay machine " + boot + str(core_quota()).encode()).hexdigest()[:16]
