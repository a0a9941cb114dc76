"""What machines offer becomes the cluster that a run is planned for."""

from __future__ import annotations

import pytest

from roundelay.errors import UsageError
from roundelay.session.offer import Offer, cluster_of, own_offer, refusal

ONE, TWO, THREE = "1" * 16, "2" * 16, "3" * 16


def offer(machine: str, probe_s: float, cores: int = 4, rtt_s: float = 0.0, bytes_per_s: float = 1e9) -> Offer:
    """Of a machine whose cores share the probe's work without a loss."""
    return Offer("a" * 16, machine, cores, cores, probe_s, probe_s / cores, 10**9, rtt_s, bytes_per_s)


def test_speeds_are_relative_to_the_host_s_and_the_slowest_link_stands_for_all() -> None:
    cluster = cluster_of([offer(ONE, 0.1), offer(TWO, 0.2, rtt_s=0.04), offer(THREE, 0.05, bytes_per_s=1e7)])
    assert [worker.speed for worker in cluster.workers] == [1.0, 0.5, 2.0]
    assert (cluster.links.between.latency_s, cluster.links.between.bytes_per_s) == (0.02, 1e7)


def test_processes_of_one_machine_are_equally_fast_and_share_its_cores() -> None:
    offers = [offer(ONE, 0.1), offer(ONE, 0.3), offer(TWO, 0.2)]
    workers = cluster_of(offers, speedup=4.0).workers
    assert [worker.speed for worker in workers] == [1.0, 1.0, 1.0]  # half of a machine is as fast as all of the other
    assert [worker.threads for worker in workers] == [2, 2, 4]


def test_each_machine_computes_with_its_own_threads_or_with_those_that_are_given() -> None:
    offers = [offer(ONE, 0.1, cores=4), offer(TWO, 0.05, cores=16), offer(THREE, 0.1, cores=1)]
    assert [worker.threads for worker in cluster_of(offers).workers] == [4, 16, 1]
    assert [worker.threads for worker in cluster_of(offers, 2).workers] == [2, 2, 2]


@pytest.mark.parametrize(
    ("speedup", "threads", "speeds"),
    [
        (4.0, None, [1.0, 8.0, 0.25]),  # as the probe
        (1.0, None, [1.0, 2.0, 1.0]),  # by one thread alone
        (2.0, None, [1.0, 2 * 0.5 / (1 / 3 + 2 / 3 / 16), 0.5]),  # a third of its work is not divided
        (4.0, 2, [1.0, 2.0, 0.5]),
    ],
)
def test_threads_speed_machines_up_as_far_as_they_do_so_for_the_model_on_the_host(
    speedup: float, threads: int | None, speeds: list[float]
) -> None:
    offers = [offer(ONE, 0.1, cores=4), offer(TWO, 0.05, cores=16), offer(THREE, 0.1, cores=1)]
    found = [worker.speed for worker in cluster_of(offers, threads, speedup).workers]
    assert found == pytest.approx(speeds, abs=1e-3)


@pytest.mark.parametrize(
    ("cores", "own", "count", "speed"),
    [(16, 1, None, 1.0), (16, 16, 4, 1.0), (2, 1, None, 1.0), (1, 1, None, 0.5)],
    ids=["a thread each", "few of many", "a core each", "half a core each"],
)
def test_processes_of_one_machine_are_slower_only_where_they_have_more_threads_than_cores(
    cores: int, own: int, count: int | None, speed: float
) -> None:
    two = Offer("a" * 16, TWO, cores, own, 0.1, 0.1 / own, 10**9)
    alone = Offer("a" * 16, ONE, 4, count or 1, 0.1, 0.1 / (count or 1), 10**9)
    workers = cluster_of([alone, two, two], count, speedup=float(count or 1)).workers
    assert [worker.speed for worker in workers] == [1.0, speed, speed]


def test_processes_of_one_machine_with_other_threads_have_a_speed_each() -> None:
    few, many = Offer("a" * 16, ONE, 32, 2, 0.1, 0.05, 10**9), Offer("a" * 16, ONE, 32, 32, 0.1, 0.1 / 32, 10**9)
    workers = cluster_of([few, many], speedup=2.0).workers
    assert [worker.threads for worker in workers] == [1, 16]
    assert workers[1].speed > 4


def test_what_threads_are_worth_is_the_probe_s_word_where_the_host_has_one() -> None:
    workers = cluster_of([offer(ONE, 0.1, cores=1), offer(TWO, 0.1, cores=8)], speedup=1.0).workers
    assert [worker.speed for worker in workers] == [1.0, 8.0]


def test_a_machine_knows_itself_and_an_offer_is_read_as_it_was_written() -> None:
    own, again = own_offer(10, address=("203.0.113.7", 7700)), own_offer(10)
    assert own.machine == again.machine
    assert Offer.parse(own.text(), "worker-1") == own
    assert refusal(own, again) == ""


def test_a_machine_offers_the_threads_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("ROUNDELAY_CORES", "7")
    assert own_offer(10).threads == 7


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "x\x1b]0;PWNED\x07", "0.0.0.0", "a\0b"])
def test_an_address_that_is_none_is_no_offer(host: str) -> None:
    with pytest.raises(UsageError, match="as its address") as caught:
        Offer.parse(own_offer(10, address=(host, 7700)).text(), "worker-1")
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"arithmetic": "x"}'])
def test_what_is_no_offer_is_told_by_the_machine_s_name(text: str) -> None:
    with pytest.raises(UsageError, match="offer of worker-1"):
        Offer.parse(text, "worker-1")
