"""What is made of measured links and devices; and two network namespaces as two hosts, where root may make them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from autopipe.core import files
from autopipe.core.cluster import Cluster, Device, Link, Pair, Tier
from autopipe.runtime.links import MOST_PAIRS, Found, cluster_of, measured_pairs

NEAR, FAR = Link(1e-4, 2e9, 1e-3), Link(2e-3, 1e8, 1e-3)
ROOT = Path(__file__).parents[2]


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


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def namespaces():
    """Two network namespaces joined by a link of 200 Mbit/s, each with address 10.99.0.N on ``v``."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, ip and tc")
    names = [f"autopipe{uuid.uuid4().hex[:6]}" for _ in range(2)]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", "v", "netns", names[0], "type", "veth", "peer", "name", "v", "netns", names[1])
            for number, name in enumerate(names, 1):
                _ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", "v")
                _ip("-n", name, "link", "set", "v", "up")
                _ip("-n", name, "link", "set", "lo", "up")
                shape = ["tc", "qdisc", "add", "dev", "v", "root", "tbf"]
                limits = ["rate", "200mbit", "burst", "256kb", "latency", "50ms"]
                subprocess.run(["ip", "netns", "exec", name, *shape, *limits], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode().strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_namespaces_are_two_hosts_with_the_shaper_s_bandwidth(namespaces, tmp_path):
    """Started as torchrun starts ranks on two hosts; rank 0 alone writes the file."""
    ranks = []
    for rank, name in enumerate(namespaces):
        world = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.99.0.1",
            "MASTER_PORT": "29577",
            "TORCHELASTIC_RUN_ID": "test",
            "GLOO_SOCKET_IFNAME": "v",
            "PYTHONPATH": str(ROOT),
        }
        output = tmp_path / f"cluster-{rank}.json"
        command = [sys.executable, "-m", "autopipe", "cluster", "-o", str(output)]
        line = ["ip", "netns", "exec", name, *command]
        ranks.append(subprocess.Popen(line, env=os.environ | world, stderr=subprocess.PIPE, stdout=subprocess.PIPE))
    told = [rank.communicate(timeout=500) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert not (tmp_path / "cluster-1.json").exists()
    made = files.read(tmp_path / "cluster-0.json", Cluster)
    assert (made.name, len(made), made.tiers[0].name) == ("2 hosts", 2, "network")
    assert made.link(0, 1).bytes_per_s == pytest.approx(200e6 / 8, rel=0.1)


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
