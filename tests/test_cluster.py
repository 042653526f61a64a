from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.core.cluster import Cluster, Device, Link, Pair, Tier
from autopipe.core.errors import UsageError

NEAR, FAR, ODD = Link(1e-6, 300e9), Link(15e-6, 12e9), Link(1e-3, 1e8)
NODES = Cluster(
    "two nodes",
    (Device("A100", 80 * 2**30, 4), Device("H100", 80 * 2**30, 4, 2.0)),
    (Tier("NVLink", 4, NEAR), Tier("Ethernet", 8, FAR)),
    (Pair(1, 6, ODD),),
)


def test_ranks_run_through_the_devices_in_order():
    assert len(NODES) == 8
    assert [device.name for device in NODES.ranks()] == ["A100"] * 4 + ["H100"] * 4
    assert all(device.count == 1 for device in NODES.ranks())


@pytest.mark.parametrize(
    ("first", "second", "link"),
    [(0, 3, NEAR), (4, 7, NEAR), (3, 4, FAR), (0, 7, FAR), (1, 6, ODD), (6, 1, ODD), (5, 5, None)],
)
def test_a_link_is_the_innermost_tier_that_joins_both_ranks(first, second, link):
    assert NODES.link(first, second) == link


def test_a_transfer_takes_latency_and_size_over_bandwidth():
    assert FAR.transfer_s(12_000_000) == pytest.approx(15e-6 + 1e-3)
    assert FAR.transfer_s(0) == 0


@given(st.integers(min_value=1, max_value=8))
def test_take_keeps_the_first_devices_and_their_links(count):
    taken = NODES.take(count)
    assert list(taken.ranks()) == list(NODES.ranks())[:count]
    assert all(taken.link(a, b) == NODES.link(a, b) for a in range(count) for b in range(count))


@pytest.mark.parametrize("count", [0, -1, 9])
def test_take_refuses_more_than_there_are(count):
    with pytest.raises(UsageError, match=rf"{count} devices wanted.*has 8: use --devices 1…8"):
        NODES.take(count)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device("x", 1, 0), "count is 0"),
        (lambda: Device("x", 0), "must be positive"),
        (lambda: Device("x", 1, 1, 0.0), "must be positive"),
        (lambda: Link(-1e-6, 1e9), "latency_s >= 0"),
        (lambda: Link(1e-6, 0), "bytes_per_s > 0"),
        (lambda: Cluster("x", (), ()), "no devices"),
        (lambda: Cluster("x", (Device("d", 1, 4),), (Tier("t", 2, NEAR),)), "4 devices.*joins only 2"),
        (lambda: Cluster("x", (Device("d", 1, 2),), ()), "2 devices.*joins only 1"),
    ],
)
def test_impossible_clusters_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_one_device_needs_no_link():
    assert Cluster("x", (Device("d", 1),), ()).link(0, 0) is None


def test_some_devices_keep_their_links() -> None:
    fast, slow, own = Link(0.0, 9.0), Link(0.0, 1.0), Link(0.0, 5.0)
    devices = tuple(Device(f"device {n}", n + 1) for n in range(4))
    whole = Cluster("c", devices, (Tier("in", 2, fast), Tier("out", 4, slow)), (Pair(1, 3, own),))
    some = whole.only((1, 2, 3))
    assert [device.name for device in some.ranks()] == ["device 1", "device 2", "device 3"]
    assert [some.link(a, b) for a, b in ((0, 1), (0, 2), (1, 2))] == [slow, own, fast]
    assert whole.only((0, 1)) == whole.take(2)
