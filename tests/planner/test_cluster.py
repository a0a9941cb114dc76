"""A file that declares a cluster: what it says, and what makes no sense is refused in one line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import PlanError
from roundelay.planner.cluster import Cluster, ClusterLink, ClusterWorker, read_cluster
from tests.ir.garbled import garbled
from tests.lower.plans import plan_of

TEXT = """
[[workers]]
memory = "8GiB"
node = "a"
count = 2
[[workers]]
speed = 0.5
node = "b"
[links]
within = { latency_s = 5e-6, bytes_per_s = 2e10 }
between = { latency_s = 1e-3, bytes_per_s = 1e7 }
"""
MESH = "flops_per_s = 1e12\n[mesh]\ndata = { size = 2, latency_s = 1e-6, bytes_per_s = 1e10 }\n"


def test_workers_are_numbered_as_they_stand_in_the_file() -> None:
    cluster = Cluster.parse(TEXT, "c.toml")
    fast = [ClusterWorker(f"w{k}", k, 1.0, 8 * 2**30, "a") for k in range(2)]
    assert cluster.workers == (*fast, ClusterWorker("w2", 2, 0.5, math.inf, "b"))
    assert cluster.links is not None
    assert cluster.links.between == ClusterLink(latency_s=1e-3, bytes_per_s=1e7)
    assert cluster.most_on_a_node == 2
    assert Cluster.parse(MESH, "c.toml").sizes == {"data": 2}


def test_a_plan_tells_of_unequal_workers() -> None:
    plan = plan_of("1f1b", 2, 2)
    assert Cluster.of(plan) is None
    text = plan.text().replace('name = "w1"', 'name = "far"').replace('["w1"]', '["far"]')
    text = text.replace("speed = 1.0", "speed = 0.5", 1).replace('["far"]', "[@]").replace('["w0"]', '["far"]')
    cluster = Cluster.of(plan.parse(text.replace("[@]", '["w0"]')))
    assert cluster is not None
    assert [(own.name, own.number, own.speed) for own in cluster.workers] == [("far", 1, 1.0), ("w0", 0, 0.5)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no axis and no worker"),
        ("workers = []", "no axis and no worker"),
        ("[[workers]]\nspeed = 0", ">= 1e-06"),
        ("[[workers]]\nspeed = nan", "the cluster file"),
        ("[[workers]]\nspeed = inf", "<= 1000000"),
        ("[[workers]]\nsped = 1", "unknown field `sped`"),
        ("[[workers]]\ncount = 0", ">= 1"),
        ("[[workers]]\ncount = 2000", "<= 1024"),
        ('[[workers]]\nmemory = "much"', "much"),
        ("[[workers]]\nmemory = -1", "-1"),
        ("workers = 3", "Expected `array`"),
        ("[[workers]\n", "the cluster file"),
        (TEXT.replace("between", "beside"), "unknown field `beside`"),
        (TEXT.replace("within = { latency_s = 5e-6, bytes_per_s = 2e10 }", ""), "missing required field `within`"),
        (TEXT.replace("bytes_per_s = 1e7", "bytes_per_s = 0"), "> 0"),
        ("flops_per_s = 1e9\n" + TEXT, "flops_per_s beside workers"),
        (MESH + TEXT, "an axis and a worker"),
        (MESH + "[links]" + TEXT.partition("[links]")[2], "links beside mesh"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, told: str) -> None:
    with pytest.raises(PlanError) as refused:
        Cluster.parse(text, "c.toml")
    assert told in str(refused.value)
    assert "c.toml" in refused.value.subject
    assert refused.value.exit_code == 2


def test_a_file_without_what_is_wanted_and_one_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(MESH)
    assert read_cluster(file, "mesh").sizes
    with pytest.raises(PlanError, match="no workers: a mesh is for --space all"):
        read_cluster(file, "workers")
    file.write_bytes(b"\xff")
    for path in (file, tmp_path / "none.toml"):
        with pytest.raises(PlanError, match="the cluster file"):
            read_cluster(path, "workers")


@given(st.sampled_from([TEXT, MESH]).flatmap(garbled))
def test_a_garbled_file_declares_something_or_is_refused(text: str) -> None:
    try:
        cluster = Cluster.parse(text, "c.toml")
    except PlanError:
        return
    assert bool(cluster.workers) != bool(cluster.mesh)
    assert all(0 < own.speed < 1e7 and own.memory >= 0 for own in cluster.workers)


@given(st.text(max_size=60))
def test_any_text_is_refused_or_declares_a_cluster(text: str) -> None:
    with pytest.raises(PlanError):
        Cluster.parse(text, "c.toml")
