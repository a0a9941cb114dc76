"""A machine's profile: its text, what is refused, and what it says of messages and exchanges."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from roundelay.errors import PlanError
from roundelay.ir.exchange import all_gather, all_reduce, all_to_all, reduce_scatter
from roundelay.planner.cost_curve import Curve
from roundelay.planner.machine_profile import MESSAGE, SHARED, LinkCosts, MachineProfile, OperatorCosts


def line(latency, slope):
    return Curve(((0, latency), (1 << 20, latency + slope * (1 << 20))), 0.1, 0.1)


def ring(kind, group, latency_times, bytes_times):
    return LinkCosts(
        kind=kind, group=group, seconds=line(latency_times * 1e-4, bytes_times * 1e-9), cpu=line(1e-5, 1e-10)
    )


PROFILE = MachineProfile(
    format=1,
    made=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    processor="A processor",
    cores=4,
    torch="2.13.0",
    memory_bytes=8 << 30,
    hosts=1,
    transport="shm",
    workers=4,
    threads=1,
    instruction_s=1e-5,
    message_instruction_s=3e-5,
    segment_s=2e-5,
    box_s=5e-5,
    together={"matmul": 1.2, "elementwise": 1.9, "small": 1.1},
    links=(
        LinkCosts(kind=MESSAGE, group=2, seconds=line(1e-4, 1e-9), cpu=line(5e-5, 5e-10)),
        ring("all-reduce", 4, 6, 1.5),
        ring("all-reduce", 2, 2, 1),
        ring("all-gather", 4, 3, 0.75),
        ring("reduce-scatter", 4, 3, 0.75),
        ring("all-to-all", 4, 3, 3 / 16),
        LinkCosts(kind=SHARED, group=4, seconds=line(1e-5, 1e-11), cpu=line(1e-5, 0)),
    ),
    operators=(
        OperatorCosts(kind="matmul", unit="FLOPs", seconds=line(1e-6, 1e-11)),
        OperatorCosts(kind="matmul-backward", unit="FLOPs", seconds=line(2e-6, 2e-11)),
    ),
)


def test_a_profile_prints_as_what_is_parsed():
    assert MachineProfile.parse(PROFILE.text()) == PROFILE
    alone = replace(PROFILE, links=(), workers=1)
    assert MachineProfile.parse(alone.text()) == alone


def test_every_beginning_of_a_profile_is_refused():
    lines = PROFILE.text().splitlines(keepends=True)
    for end in range(len(lines)):
        with pytest.raises(PlanError):
            MachineProfile.parse("".join(lines[:end]))
    text = PROFILE.text()
    for end in range(len(text) - 60, len(text)):
        with pytest.raises(PlanError):
            MachineProfile.parse(text[:end])


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("format = 1", "format = 2", "'format'"),
        ("format = 1", 'format = "1"', "'format'"),
        ("cores = 4", "cores = 0", "cores"),
        ("box_s = 5e-05", "box_s = nan", "box_s"),
        ('made = "2026-01-02', 'made = "yesterday', "made"),
        ("+00:00", "", "made"),
        ("group = 2", 'group = "2"', "links[0].group"),
        ("box_s", "boxes_s", "another file"),
        ("segment_s = 2e-05\n", "", "segment_s"),
        ("points = [[0, 1e-06]", "points = [[9999999, 1e-06]", "operators[0].seconds"),
        ("points = [[0, 1e-06]", "points = [[0, -1e-06]", "operators[0].seconds"),
    ],
)
def test_a_wrong_field_is_refused_with_exit_code_2(old, new, where):
    text = PROFILE.text().replace(old, new, 1)
    assert text != PROFILE.text()
    with pytest.raises(PlanError) as refused:
        MachineProfile.parse(text)
    assert where in str(refused.value)
    assert refused.value.subject.startswith("the machine's profile")
    assert refused.value.exit_code == 2
    assert "roundelay calibrate" in refused.value.remedy


@pytest.mark.parametrize("text", ["", "[project]\nname = 'x'\n", "format = 10\nrule = '1f1b'\n", "no toml", "\x00"])
def test_another_file_is_refused(text):
    with pytest.raises(PlanError, match="the machine's profile"):
        MachineProfile.parse(text)


def test_a_profile_of_another_machine_is_refused_by_what_differs():
    here = {"processor": "A processor", "cores": 4, "torch": "2.13.0"}
    PROFILE.check_machine(here)
    with pytest.raises(PlanError, match=r"got cores 4, torch 2.13.0; expected cores 8, torch 2.14.0"):
        PROFILE.check_machine(here | {"cores": 8, "torch": "2.14.0"})


@pytest.mark.parametrize(
    ("later", "age"),
    [
        (timedelta(seconds=5), "less than a minute"),
        (timedelta(minutes=1), "1 minute"),
        (timedelta(hours=5, minutes=59), "5 hours"),
        (timedelta(days=40), "40 days"),
    ],
)
def test_a_profile_tells_its_age(later, age):
    assert PROFILE.age(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC) + later) == age


def test_exchanges_are_priced_by_kind_size_and_group():
    assert PROFILE.exchange_s(all_reduce(), 1 << 20, 4) == pytest.approx(6e-4 + 1.5e-9 * (1 << 20))
    assert PROFILE.exchange_s(all_reduce(op="max"), 0, 4) == pytest.approx(6e-4)
    assert PROFILE.exchange_s(all_gather(1), 0, 4) == pytest.approx(3e-4)
    assert PROFILE.exchange_s(reduce_scatter(3), 0, 4) == pytest.approx(3e-4)
    assert PROFILE.exchange_s(all_to_all(1, 3), 1 << 20, 4) == pytest.approx(3e-4 + 3e-9 / 16 * (1 << 20))
    assert PROFILE.exchange_s(reduce_scatter() + all_to_all(0, 1), 0, 4) == pytest.approx(6e-4)
    assert PROFILE.exchange_s((), 1 << 20, 4) == 0.0
    assert PROFILE.exchange_s(all_reduce(), 1 << 20, 1) == 0.0
    assert PROFILE.exchange_cpu_s(all_reduce(), 1 << 20, 2) == pytest.approx(1e-5 + 1e-10 * (1 << 20))


def test_groups_that_were_not_measured_lie_between_those_that_were_by_the_logarithm():
    two, four = (PROFILE.exchange_s(all_reduce(), 0, group) for group in (2, 4))
    assert (two, four) == pytest.approx((2e-4, 6e-4))
    assert PROFILE.exchange_s(all_reduce(), 0, 3) == pytest.approx(two + (four - two) * 0.5849625007)
    assert PROFILE.exchange_s(all_gather(), 0, 3) == PROFILE.exchange_s(all_gather(), 0, 4)


def test_sums_of_weights_gradients_are_shared_where_that_was_measured():
    assert PROFILE.exchange_s(all_reduce(), 0, 4, shared=True) == pytest.approx(1e-5)
    without = replace(PROFILE, links=PROFILE.links[:-1])
    assert without.exchange_s(all_reduce(), 0, 4, shared=True) == pytest.approx(6e-4)
    assert PROFILE.exchange_s(all_gather(), 0, 4, shared=True) == pytest.approx(3e-4)


def test_what_was_not_measured_is_named():
    with pytest.raises(PlanError, match="links: all-gather: got none with 4 workers over shm; expected one of"):
        replace(PROFILE, links=PROFILE.links[:2]).exchange_s(all_gather(), 0, 2)
    with pytest.raises(PlanError, match=r"links: message.* as many workers"):
        replace(PROFILE, links=()).message_s(8)
    with pytest.raises(PlanError, match="one of matmul, matmul-backward"):
        PROFILE.operator_s("convolution", 8)


def test_operators_and_messages_are_priced_by_size():
    assert PROFILE.operator_s("matmul-backward", 1 << 20) == pytest.approx(2e-6 + 2e-11 * (1 << 20))
    assert PROFILE.message_s(1 << 20) == pytest.approx(1e-4 + 1e-9 * (1 << 20))
    assert PROFILE.message_cpu_s(1 << 20) == pytest.approx(5e-5 + 5e-10 * (1 << 20))


def test_a_single_line_of_rings_is_found_and_used_for_messages_too():
    dear = replace(PROFILE.links[0], seconds=line(9.0, 9.0))
    own = replace(PROFILE, links=(dear, *PROFILE.links[1:-1]))
    single = own.single_line()
    for size in (0, 1 << 22):
        assert single.message_s(size) == pytest.approx(1e-4 + 1e-9 * size)
        assert single.exchange_s(all_reduce(), size, 4) == pytest.approx(own.exchange_s(all_reduce(), size, 4))
    assert single.exchange_cpu_s(all_gather(), 100, 4) == own.exchange_cpu_s(all_gather(), 100, 4)
    shared = PROFILE.single_line()
    assert shared.exchange_s(all_reduce(), 0, 4, shared=True) == shared.exchange_s(all_reduce(), 0, 4)
    alone = replace(PROFILE, links=())
    assert alone.single_line() == alone


def test_without_cpu_nothing_takes_cpu_seconds():
    free = PROFILE.without_cpu()
    assert free.message_cpu_s(1 << 20) == free.exchange_cpu_s(all_reduce(), 1 << 20, 4) == 0.0
    assert free.message_s(1 << 20) == PROFILE.message_s(1 << 20)
    assert free.exchange_s(all_reduce(), 1 << 20, 4) == PROFILE.exchange_s(all_reduce(), 1 << 20, 4)
