"""Two network namespaces as two hosts with a shaped link between them, where root may make them.

The link is measured, a plan follows it, and what the plan promises is measured over the same link.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopipe.core import files
from autopipe.core.cluster import Cluster
from autopipe.core.result import CheckResult

ROOT = Path(__file__).parents[2]
SLOW_BITS_S = 20_000_000
LINK = "link0"  # torch ignores interfaces whose name has one letter
MODEL = """
import torch
from torch import nn

WIDE, NARROW = 768, 16


class Block(nn.Module):
    def __init__(self, into=WIDE, out=WIDE):
        super().__init__()
        self.widen = nn.Identity() if into == WIDE else nn.Linear(into, WIDE)
        self.body = nn.Linear(WIDE, WIDE)
        self.narrow = nn.Identity() if out == WIDE else nn.Linear(WIDE, out)

    def forward(self, x):
        return self.narrow(torch.tanh(self.body(self.widen(x))))


def build_model():
    widths = [(WIDE, WIDE)] * 5 + [(WIDE, NARROW), (NARROW, WIDE), (WIDE, WIDE)]
    return nn.Sequential(*(Block(*each) for each in widths))


def example_batch(batch_size):
    seed = torch.Generator().manual_seed(0)
    return (torch.randn(batch_size, WIDE, generator=seed),), torch.randn(batch_size, WIDE, generator=seed)


def loss_fn(output, target):
    return ((output - target) ** 2).mean()
"""
"""Eight blocks that take equally long; what crosses is wide everywhere but behind the sixth."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two network namespaces with a link between them, each with address 10.99.0.N on ``LINK``."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, ip and tc")
    names = [f"autopipe{uuid.uuid4().hex[:6]}" for _ in range(2)]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
            for number, name in enumerate(names, 1):
                _ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", LINK)
                _ip("-n", name, "link", "set", LINK, "up")
                _ip("-n", name, "link", "set", "lo", "up")
            shape(names, SLOW_BITS_S)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode().strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def shape(hosts: list[str], bits_s: int, *queue: str) -> None:
    """Let so many bits through each end in a second; what waits, waits in a queue of 2 MB or as said."""
    for name in hosts:
        limits = ["rate", f"{bits_s}bit", "burst", "256kb", *(queue or ("limit", "2mb"))]
        shaper = ["tc", "qdisc", "replace", "dev", LINK, "root", "tbf", *limits]
        subprocess.run(["ip", "netns", "exec", name, *shaper], check=True, capture_output=True)


def on_both(hosts: list[str], folder: Path, *command: str) -> list[str]:
    """What a command prints on each host, started as torchrun starts ranks on two hosts."""
    ranks = []
    for rank, name in enumerate(hosts):
        world = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.99.0.1",
            "MASTER_PORT": "29577",
            "TORCHELASTIC_RUN_ID": "test",
            "GLOO_SOCKET_IFNAME": LINK,
        }
        line = ["ip", "netns", "exec", name, sys.executable, "-m", "autopipe", *command]
        ranks.append(
            subprocess.Popen(
                line,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | world,
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        told = [rank.communicate(timeout=400) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    return [out for out, _ in told]


def alone(folder: Path, *command: str) -> None:
    """A command on this host; it must end well."""
    line = [sys.executable, "-m", "autopipe", *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


COPIED_BYTES, COPIES = 1 << 23, 9
COPY = f"""
import socket, statistics, sys, threading, time

rank, both = int(sys.argv[1]), sys.argv[2] == "both"
place, data, room = ("10.99.0.1", 29701), bytes({COPIED_BYTES}), memoryview(bytearray({COPIED_BYTES}))
if rank == 0:
    peer, _ = socket.create_server(place).accept()
else:
    while True:
        try:
            peer = socket.create_connection(place)
            break
        except OSError:
            time.sleep(0.1)


def take(size):
    got = 0
    while got < size:
        got += peer.recv_into(room[got:size])


def met():
    peer.sendall(b"x")
    take(1)


seconds = []
for _ in range({COPIES} + 1):
    met()
    start = time.perf_counter()
    sender = threading.Thread(target=peer.sendall, args=(data,))
    if both or rank == 0:
        sender.start()
    if both or rank == 1:
        take(len(data))
    if both or rank == 0:
        sender.join()
    met()
    seconds.append(time.perf_counter() - start)
print(len(data) / statistics.median(seconds[1:]))
"""
"""A copy between two plain sockets, one way or both ways at once: what the link really carries, in bytes a second."""


def copied_bytes_s(hosts: list[str], way: str) -> float:
    line = ["ip", "netns", "exec"]
    ends = [
        subprocess.Popen([*line, name, sys.executable, "-c", COPY, str(rank), way], stdout=subprocess.PIPE, text=True)
        for rank, name in enumerate(hosts)
    ]
    first, _ = (end.communicate(timeout=120)[0] for end in ends)
    return float(first)


ON_THE_WIRE = 1448 / 1514
"""The part of an Ethernet frame that is data of TCP: the shaper counts whole frames."""


@pytest.mark.parametrize("bits_s", [200_000_000, 50_000_000])
def test_two_namespaces_are_two_hosts_with_the_link_s_bandwidth(hosts, tmp_path, bits_s):
    """Rank 0 alone prints and writes. What is measured is what plain sockets carry both ways at once.

    One way they carry the shaper's rate, headers taken off. Both ways at once it is less where the link is slow:
    acknowledgements wait in the queue behind the data that goes their way.
    """
    shape(hosts, bits_s, "latency", "50ms")
    first, second = on_both(hosts, tmp_path, "cluster")
    assert "2 hosts" in first
    assert second == ""
    made = files.read(tmp_path / "cluster.json", Cluster)
    assert (made.name, len(made), made.tiers[0].name) == ("2 hosts", 2, "network")
    one, both = copied_bytes_s(hosts, "one"), copied_bytes_s(hosts, "both")
    found = made.link(0, 1).bytes_per_s
    print({name: f"{rate * 8 / bits_s:.1%} of the shaper's rate" for name, rate in
           (("one way", one), ("both ways", both), ("measured", found))})  # fmt: skip
    assert one == pytest.approx(ON_THE_WIRE * bits_s / 8, rel=0.02)
    assert found == pytest.approx(both, rel=0.1)
    assert found == pytest.approx(bits_s / 8, rel=0.1)


def test_a_slow_link_moves_the_cut_to_the_narrow_activation(hosts, tmp_path):
    """Of the plan for a fast link and the one for a slow link each is the faster one over its own."""
    (tmp_path / "model.py").write_text(MODEL)
    links = {"fast": 4_000_000_000, "slow": SLOW_BITS_S}
    plans, steps = {}, {}
    for link, bits_s in links.items():
        shape(hosts, bits_s)
        on_both(hosts, tmp_path, "cluster", "-o", f"{link}.cluster.json")
        asked = ["--global-batch=768", "--micro-batch=128", "--depth=2", "--schedule=1F1B", "--budget=10"]
        alone(tmp_path, "plan", "model.py", "--cluster", f"{link}.cluster.json", *asked, "-o", f"{link}.json")
        plans[link] = files.load(tmp_path / f"{link}.json")
    assert max(len(stage.layers) for stage in plans["fast"].stages) <= 5  # 4, but on a busy machine
    assert [len(stage.layers) for stage in plans["slow"].stages] == [6, 2]
    for link, bits_s in links.items():
        shape(hosts, bits_s)
        for plan in plans:
            on_both(hosts, tmp_path, "check", f"{plan}.json")
            result = files.read(tmp_path / f"{plan}.check.json", CheckResult)
            assert result.parity.passed
            steps[link, plan] = result.measured.step_s
    print({pair: f"{step_s:.3f} s" for pair, step_s in steps.items()})
    assert steps["fast", "fast"] < steps["fast", "slow"]
    assert steps["slow", "slow"] < steps["slow", "fast"]
