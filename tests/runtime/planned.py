"""Plans for tests that run them: from made-up costs, so that nothing is measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import autopipe
from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.plan import ModelRef, Plan
from autopipe.core.profile import CostTable, LayerCost, Profile
from autopipe.runtime.checking.reduction import find_reduction
from autopipe.runtime.measuring.profiling import capture_checked, facts_of
from autopipe.runtime.workload import ModelFile

ZOO_FILE = """from tests.models import ZOO

case = ZOO["{name}"]
build_model, example_batch, loss_fn = case.build_model, case.example_batch, case.loss_fn
"""


def zoo_file(folder: Path, name: str) -> Path:
    """A model file for a model of the zoo."""
    path = folder / f"{name}.py"
    path.write_text(ZOO_FILE.format(name=name))
    return path


def plan_of(
    path: Path, depth: int, schedule: str, micro_batch: int = 2, micro_batches: int = 4, *, replicas: int = 1
) -> Plan:
    """A plan for a model file: equal layers, the head twice as dear. Each replica takes the micro-batches."""
    workload = ModelFile(str(path)).open()
    captured = capture_checked(workload, max(2, micro_batch))
    reduction, _ = find_reduction(ModelFile(str(path)).open(), captured.dtype)
    facts = dataclasses.replace(facts_of(workload, captured, "cpu", 1, depth, "adamw"), reduction=reduction)
    costs = tuple(LayerCost(1e-3, 2e-3, 1e-3, 1e-3, 1000, 1000, 100) for _ in facts.layers[:-1])
    table = CostTable(micro_batch, (*costs, LayerCost(2e-3, 4e-3, 2e-3, 2e-3, 1000, 1000, 100)))
    profile = Profile(**{**vars(facts), "costs": (table,)})
    cluster = Cluster("test", (Device("cpu", 8 << 30, depth),), (Tier("local", depth, Link(1e-5, 1e9)),))
    plan = autopipe.plan(
        profile,
        cluster,
        global_batch=micro_batch * micro_batches,
        depths=[depth],
        schedules=[schedule],
        allow_stale=True,
        micro_batches=[micro_batch],
        model=ModelRef(path.name, str(path)),
    )
    return dataclasses.replace(plan, replicas=replicas, global_batch=plan.global_batch * replicas)
