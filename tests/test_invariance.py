"""What must not matter to a plan: names of layers, the order of equal devices, how often it is made.

That scaling all costs only scales the step is in test_search.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe import plan
from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.errors import NoPlanFits
from autopipe.core.files import to_json
from autopipe.core.plan import FileRef, Plan
from autopipe.core.profile import Profile
from tests.test_planning import random_profile

seeds = st.integers(0, 2**32 - 1)


def request(rng: random.Random) -> tuple[Profile, list[Device], dict[str, Any]]:
    """A profile, four devices, some of them equal, and what is asked for: often tight, sometimes with replicas."""
    profile = random_profile(rng, rng.randint(2, 6))
    needed = 4 * sum(layer.parameter_bytes for layer in profile.layers)
    kinds = [(rng.randint(needed // 3, 3 * needed), rng.choice([1.0, 0.7])) for _ in range(2)]
    devices = [Device(f"device {n}", memory, 1, speed) for n, (memory, speed) in enumerate(rng.choices(kinds, k=4))]
    asked: dict[str, Any] = {
        "global_batch": 4,
        "replicas": rng.choice([None, [1, 2]]),
        "schedules": rng.choice([None, ["1F1B", "ZB-H1"]]),
        "headroom": 0.0,
        "shard_optimizer": rng.choice([False, True]),
    }
    return profile, devices, asked


def joined(devices: list[Device]) -> Cluster:
    """Devices in pairs over a fast link, the pairs over a slow one."""
    tiers = (Tier("in", 2, Link(0.01, 1e4)), Tier("out", len(devices), Link(0.1, 1e3)))
    return Cluster("made by hand", tuple(devices), tiers)


def made(profile: Profile, devices: list[Device], asked: dict[str, Any]) -> Plan | str:
    """The plan, or why there is none."""
    try:
        return plan(profile, joined(devices), profile_ref=FileRef("p"), cluster_ref=FileRef("c"), **asked)
    except NoPlanFits as error:
        return str(error)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_two_runs_give_equal_bytes(seed: int) -> None:
    first, second = (made(*request(random.Random(seed))) for _ in range(2))
    assert first == second
    if isinstance(first, Plan):
        assert to_json(first) == to_json(second)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_equal_devices_may_change_places(seed: int) -> None:
    rng = random.Random(seed)
    profile, devices, asked = request(rng)
    by_kind: dict[tuple[int, float], list[Device]] = {}
    for device in devices:
        by_kind.setdefault((device.memory_bytes, device.speed), []).append(device)
    for same in by_kind.values():
        rng.shuffle(same)
    moved = [by_kind[device.memory_bytes, device.speed].pop() for device in devices]
    assert made(profile, moved, asked) == made(profile, devices, asked)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_renaming_layers_changes_names_only(seed: int) -> None:
    profile, devices, asked = request(random.Random(seed))
    names = [f"renamed.{len(profile.layers) - i}" for i in range(len(profile.layers))]
    layers = tuple(replace(layer, name=n, modules=(n,)) for layer, n in zip(profile.layers, names, strict=True))
    one, other = made(profile, devices, asked), made(replace(profile, layers=layers), devices, asked)
    if not isinstance(one, Plan) or not isinstance(other, Plan):
        assert other == one
        return
    back = {new: layer.name for new, layer in zip(names, profile.layers, strict=True)}
    stages = tuple(
        replace(
            stage,
            layers=tuple(back[name] for name in stage.layers),
            modules=tuple(back[name] for name in stage.modules),
            recompute=tuple(back[name] for name in stage.recompute),
        )
        for stage in other.stages
    )
    limited = other.limited_by
    for new, old in back.items():
        limited = limited.replace(f"{new} ", f"{old} ")
    assert replace(other, stages=stages, limited_by=limited) == one
