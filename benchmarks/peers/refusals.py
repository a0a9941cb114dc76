"""What strangers cost a hosted run: updates per second while they come to every port, and what the listener adds.

Three machines of this one train digits over grpc; a batch comes every 20 ms, so that two cores have time left for the
strangers, who take some of it themselves. In turn nobody comes, and one stranger after another: without a certificate,
with a foreign or an expired one, in plaintext, with pickle, with frames that are damaged, replayed, or of another
worker. The listener's share is that of messages there and back to a member's service, with it and past it.

    .venv/bin/python -m benchmarks.peers.refusals [--repeats 5] [--short] [--anyway] [--out FILE]
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.common import alternate, asked, report, spread, table
from roundelay.peers.gate import Gate
from roundelay.peers.listener import LOOPBACK
from roundelay.peers.loop_thread import LoopThread
from roundelay.peers.member_store import MemberStore
from roundelay.peers.members import HERE, Members
from roundelay.trust.authority import HOST
from tests.peers.strangers import OURS, in_child
from tests.peers.test_refused_in_mid_run import attacked
from tests.peers.told_run import Hosted, hosted

PAUSE_S, WANTED = 0.02, 0.9
CALLS = 500


def updates(run: Hosted) -> int:
    """How many the run has made."""
    return (run.out / "metrics.jsonl").read_bytes().count(b'"loss"')


def rate(run: Hosted, seconds: float, *, strangers: bool) -> float:
    """Updates per second for a while, in which strangers come or do not."""
    coming = multiprocessing.get_context("fork").Process(target=_come, args=(run, seconds), daemon=True)
    if strangers:
        coming.start()
    began, before = time.monotonic(), updates(run)
    time.sleep(seconds)
    made = (updates(run) - before) / (time.monotonic() - began)
    if strangers:
        coming.kill()
        coming.join()
    return made


def _come(run: Hosted, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        attacked(run)


def call_s(*, past: bool) -> float:
    """Seconds of a message to a member's service and back, through the listener or past it."""

    def body() -> float:
        loop = LoopThread("peers")
        gate = Gate(loop, lambda peer, why: None)
        members = Members(OURS.issue("roundelay-host", HOST), gate, lambda peer, why: None)
        (service,) = gate.listener._services.values()
        address = (LOOPBACK, service.port) if past else gate.address
        store = MemberStore(address, OURS.issue("worker-1"), "worker-1", loop)
        times = []
        for _ in range(CALLS):
            began = time.perf_counter()
            store.get(HERE, 5.0)
            times.append(time.perf_counter() - began)
        for one in (store, members, gate, loop):
            one.close()
        return statistics.median(times)

    return float(in_child(body))


def main() -> None:
    """Run, and print a table."""
    what = asked(__doc__ or "")
    seconds = 6.0 if what.short else 15.0
    steps = round(2 * what.repeats * seconds / PAUSE_S) + 2000
    calls = alternate({"through": partial(call_s, past=False), "past": partial(call_s, past=True)}, what.repeats)
    with tempfile.TemporaryDirectory() as folder, hosted(Path(folder), steps, pause_s=PAUSE_S) as run:
        run.joiners = [run.join(text, f"joiner {k}") for k, text in enumerate(run.invitations, 1)]
        run.trains()
        ways = {name: partial(rate, run, seconds, strangers=name == "strangers") for name in ("quiet", "strangers")}
        found = alternate(ways, what.repeats)
        assert run.host.poll() is None, "the run was over before the strangers were"
        refused = [json.loads(line)["reason"] for line in (run.out / "refused.jsonl").read_text().splitlines()]
    share = statistics.median(found["strangers"]) / statistics.median(found["quiet"])
    rows = [[name, spread(each, 2)] for name, each in found.items()]
    text = f"{table(['who comes', 'updates per second'], rows)}\n\nWhile strangers come {share:.2f} of the rate "
    text += f"(wanted {WANTED}); {len(refused)} refused at the host, for {len(set(refused))} reasons."
    medians = {name: 1e6 * statistics.median(each) for name, each in calls.items()}
    text += f"\n\nA message and its answer: {medians['through']:.0f} µs, past the listener {medians['past']:.0f} µs."
    report(what, text, {"updates per s": found, "call s": calls, "refused": len(refused)})


if __name__ == "__main__":
    main()
