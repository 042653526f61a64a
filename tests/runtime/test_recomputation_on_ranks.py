"""With memory between two plans' needs the cheapest layers recompute, and a real run stays under the limit."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

import autopipe
from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.plan import Plan
from autopipe.core.profile import CostTable, Profile
from autopipe.core.stage import recomputed
from autopipe.runtime.capture import capture
from autopipe.runtime.checking.parity import without_dropout
from autopipe.runtime.checking.plans import peak_bytes
from autopipe.runtime.measuring.measure import LayerTimer
from autopipe.runtime.measuring.profiling import facts_of, with_costs
from autopipe.runtime.running.runner import Runner, make_optimizer
from autopipe.runtime.workload import ModelFile, Workload
from tests.runtime.ranks import Ranks
from tests.runtime.test_checking import EXAMPLES

MICRO_BATCH, BATCHES = 2, 6


class Limited(NamedTuple):
    """What a rank found: the memory of a device, the peaks of the plans, what the run took, and each layer's price."""

    memory: int
    free: int
    tight: int
    measured: int
    again: list[str]
    prices: dict[str, float]


def profiled(workload: Workload) -> Profile:
    """The model with its own bytes, and the same seconds on every rank: later layers are dearer."""
    captured = capture(workload.model, workload.batch(MICRO_BATCH)[0])
    facts = facts_of(workload, captured, "cpu", threads=1, ranks=2, optimizer="adamw")
    batches = {MICRO_BATCH: workload.batch(MICRO_BATCH)}
    timer = LayerTimer(captured, facts.legal_cuts(), batches, workload.loss, "adamw", torch.device("cpu"))
    timer.warm_up()
    timer.rotate()
    workload.model.zero_grad()
    made = with_costs(facts, timer.samples, 0.0)
    layers = tuple(
        replace(cost, forward_s=1 + n / 10, backward_s=2 + n / 5, optimizer_s=0.0)
        for n, cost in enumerate(made.at(MICRO_BATCH))
    )
    return replace(made, costs=(CostTable(MICRO_BATCH, layers),))


def planned(profile: Profile, memory: int) -> Plan:
    """1F1B on two ranks of so much memory."""
    devices = Cluster("two", (Device("cpu", memory, 2),), (Tier("local", 2, Link(1e-4, 1e9)),))
    return autopipe.plan(profile, devices, global_batch=MICRO_BATCH * BATCHES, depths=[2], schedules=["1F1B"])


def limited() -> Limited:
    """One rank's part: plans without and with a limit, and a run of the latter."""
    workload = ModelFile(str(EXAMPLES / "gpt2.py")).open()
    without_dropout(workload.model)
    profile = profiled(workload)
    free = planned(profile, 1 << 40)
    memory = int(0.75 * max(free.predicted.peak_bytes))
    tight = planned(profile, memory)
    runner = Runner(
        capture(workload.model, workload.batch(MICRO_BATCH)[0]),
        tight.schedule.parsed(),
        tight.cuts,
        micro_batch=MICRO_BATCH,
        loss_fn=workload.loss,
        device=torch.device("cpu"),
        recompute=tight.recompute,
    )
    optimizer = make_optimizer("adamw", runner.parameters, 1e-6)
    parts = runner.split(*workload.batch(MICRO_BATCH * BATCHES))
    for _ in range(2):
        runner.timed_step(parts, optimizer)
    again = [profile.layers[n].name for n in tight.recompute]
    return Limited(
        memory,
        max(free.predicted.peak_bytes),
        max(tight.predicted.peak_bytes),
        peak_bytes(runner, parts, optimizer),
        again,
        prices(profile, tight, again),
    )


def prices(profile: Profile, plan: Plan, again: list[str]) -> dict[str, float]:
    """Seconds for each byte freed, of the layers that share a stage with those that recompute."""
    costs = profile.at(MICRO_BATCH)
    freed = {
        profile.layers[n].name: cost.held_after_forward_bytes
        - recomputed(profile, n, cost, MICRO_BATCH).held_after_forward_bytes
        for n, cost in enumerate(costs)
    }
    numbers = [n for stage in plan.stages if set(stage.layers) & set(again) for n in range(stage.start, stage.stop)]
    names = {n: profile.layers[n].name for n in numbers}
    return {name: costs[n].forward_s / freed[name] for n, name in names.items() if freed[name] > 0}


def test_a_run_stays_under_a_limit_that_makes_layers_recompute(ranks: Ranks) -> None:
    for found in ranks.run(limited, ranks=2):
        assert found.again
        assert found.tight <= 0.95 * found.memory < found.free
        assert found.measured <= found.memory
        kept = [price for name, price in found.prices.items() if name not in found.again]
        assert max(found.prices[name] for name in found.again) <= min(kept, default=float("inf"))
