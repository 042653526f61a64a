"""What is made of measured links and devices."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from autopipe.core import files
from autopipe.core.cluster import Cluster, Device, Link, Pair, Tier
from autopipe.runtime.measuring.links import MOST_PAIRS, Found, cluster_of, measured_pairs

NEAR, FAR = Link(1e-4, 2e9, 1e-3), Link(2e-3, 1e8, 1e-3)


def found(host: str = "a", device: str = "cpu", kernel_s: float = 1.0, links=None, memory: int = 2**30) -> Found:
    return Found(host, device, memory, kernel_s, links or {})


def test_equal_ranks_of_one_host_are_one_device_and_one_tier():
    made = cluster_of([found(links={(0, 1): NEAR}), found(kernel_s=1.2)], 2)
    assert made == Cluster("local", (Device("cpu", 2**30, 2),), (Tier("local", 2, NEAR),), (), "measured")


def test_devices_beyond_the_cores_are_like_the_measured_ones_and_share_the_memory():
    made = cluster_of([found(links={(0, 1): NEAR}), found()], 4)
    assert made.devices == (Device("cpu", 2**29, 4),)
    assert made.link(2, 3) == NEAR


def test_a_slower_device_has_its_speed_and_is_listed_apart():
    made = cluster_of([found(links={(0, 1): NEAR}), found(kernel_s=3.0)], 2)
    assert [(device.count, device.speed) for device in made.devices] == [(1, 1.0), (1, 0.33)]


def test_another_kind_of_device_has_its_speed_however_close():
    made = cluster_of([found(links={(0, 1): NEAR}), found(device="gpu", kernel_s=0.9)], 2)
    assert [device.speed for device in made.devices] == [1.0, 1.1]


def test_links_between_hosts_are_a_tier_of_their_own():
    links = {(a, b): NEAR if a // 2 == b // 2 else FAR for a in range(4) for b in range(a + 1, 4)}
    ranks = [found("ab"[rank // 2], links={p: link for p, link in links.items() if p[0] == rank}) for rank in range(4)]
    made = cluster_of(ranks, 4)
    assert made.name == "2 hosts"
    assert made.tiers == (Tier("host", 2, NEAR), Tier("network", 4, FAR))
    assert made.pairs == ()
    assert all(made.link(a, b) == link for (a, b), link in links.items())


def test_sums_measured_over_one_link_hold_for_its_tier():
    summing = replace(NEAR, reduce_latency_s=1e-3, reduce_bytes_per_s=1e9)
    links = {(0, 1): summing, (0, 2): NEAR, (1, 2): NEAR}
    ranks = [found(links={p: link for p, link in links.items() if p[0] == rank}) for rank in range(3)]
    made = cluster_of(ranks, 3)
    assert made.tiers[0].link == summing
    assert made.pairs == ()
    assert files.from_json(files.to_json(made), Cluster) == made


def test_one_rank_a_host_has_no_inner_tier():
    assert cluster_of([found("a", links={(0, 1): FAR}), found("b")], 2).tiers == (Tier("network", 2, FAR),)


def test_a_link_that_is_far_off_its_tier_is_listed():
    links = {(0, 1): NEAR, (0, 2): NEAR, (1, 2): FAR}
    ranks = [found(links={p: link for p, link in links.items() if p[0] == rank}) for rank in range(3)]
    assert cluster_of(ranks, 3).pairs == (Pair(1, 2, FAR),)


def test_few_ranks_are_measured_in_all_pairs_and_many_at_least_between_neighbours():
    assert len(measured_pairs(4)) == 6
    many = measured_pairs(40)
    assert many[:39] == [(rank, rank + 1) for rank in range(39)]
    assert len(measured_pairs(20)) == MOST_PAIRS


@pytest.mark.slow
def test_local_ranks_are_measured(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "autopipe", "cluster", "--devices", "2", "-o", str(tmp_path / "c.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = files.read(tmp_path / "c.json", Cluster)
    assert (made.name, len(made), made.origin) == ("local", 2, "measured")
    assert made.tiers[0].link.bytes_per_s > 1e6
