"""Profiles and clusters made by hand, for tests that need costs without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.profile import CostTable, Edge, Layer, LayerCost, Profile, Tie
from autopipe.core.schedule import Action, Op, Schedule
from autopipe.core.stage import StageCost

GIB = 2**30
FAST = Link(0.0, 1e18)


def chain(
    forward_s: Sequence[float],
    *,
    backward_s: Sequence[float] | None = None,
    parameter_bytes: Sequence[int] | int = 0,
    held_bytes: Sequence[int] | int = 0,
    output_elements: int = 1,
    micro_batches: Sequence[int] = (1,),
    optimizer_s: float = 0.0,
    workspace_bytes: int = 0,
    legal: Sequence[bool] | None = None,
    ties: Sequence[Tie] = (),
    overhead_s: float = 0.0,
    optimizer: str = "adamw",
    names: Sequence[str] | None = None,
    constant: Sequence[int] = (),
) -> Profile:
    """A chain of layers whose costs at micro-batch b are b times those given; B = 2F where not given.

    The outputs of the layers in ``constant`` need no gradient.
    """
    n = len(forward_s)
    backward = [2 * f for f in forward_s] if backward_s is None else list(backward_s)
    parameters = [parameter_bytes] * n if isinstance(parameter_bytes, int) else list(parameter_bytes)
    held = [held_bytes] * n if isinstance(held_bytes, int) else list(held_bytes)
    labels = names or [f"layers.{i}" for i in range(n)]
    layers = tuple(
        Layer(labels[i], parameters[i], parameters[i] // 4, modules=(labels[i],), cut_after=legal is None or legal[i])
        for i in range(n)
    )
    edges = (
        Edge("tokens", None, (0,), ("b",), "int64", needs_gradient=False),
        *(Edge(f"x{i}", i, (i + 1,), ("b", output_elements), "float32", i not in constant) for i in range(n - 1)),
    )
    tables = tuple(
        CostTable(
            b,
            tuple(
                LayerCost(
                    forward_s=b * forward_s[i],
                    backward_s=b * backward[i],
                    input_grad_s=b * backward[i] / 2,
                    weight_grad_s=b * backward[i] / 2,
                    held_after_forward_bytes=b * held[i],
                    held_after_input_grad_bytes=b * held[i] // 2,
                    output_bytes=4 * b * output_elements,
                    workspace_bytes=b * workspace_bytes,
                    optimizer_s=optimizer_s,
                )
                for i in range(n)
            ),
        )
        for b in micro_batches
    )
    return Profile(
        model="synthetic",
        layers=layers,
        edges=edges,
        costs=tables,
        device="made by hand",
        dtype="float32",
        ties=tuple(ties),
        optimizer=optimizer,
        overhead_s=overhead_s,
    )


def cluster(count: int, *, memory_bytes: int = 64 * GIB, link: Link = FAST, speeds: Sequence[float] = ()) -> Cluster:
    """``count`` devices, all joined by one link."""
    devices = tuple(Device("device", memory_bytes, 1, speed) for speed in speeds) or (
        Device("device", memory_bytes, count),
    )
    return Cluster("made by hand", devices, (Tier("all", count, link),))


def stage(
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    *,
    input_grad_s: float | None = None,
    weight_grad_s: float | None = None,
    optimizer_s: float = 0.0,
    static_bytes: int = 0,
    gradient: int = 0,
    first: int = 0,
    held: int = 0,
    held_i: int = 0,
    workspace: int = 0,
    receive: int = 0,
    send: int = 0,
) -> StageCost:
    """A stage's cost; gradients are as large as the activations."""
    return StageCost(
        forward_s=forward_s,
        backward_s=backward_s,
        input_grad_s=backward_s / 2 if input_grad_s is None else input_grad_s,
        weight_grad_s=backward_s / 2 if weight_grad_s is None else weight_grad_s,
        optimizer_s=optimizer_s,
        parameter_bytes=static_bytes,
        gradient_bytes=gradient,
        optimizer_bytes=0,
        buffer_bytes=0,
        held_after_forward_bytes=held,
        held_after_input_grad_bytes=held_i,
        workspace_bytes=workspace,
        receive_bytes=receive,
        send_bytes=send,
        receive_grad_bytes=send,
        send_grad_bytes=receive,
        first_backward_bytes=first,
    )


def random_schedule(
    rng: random.Random, *, ranks: int, stages: int, micro_batches: int, in_order: bool = False, in_turn: bool = False
) -> Schedule:
    """Any valid table: free placement, each backward whole or split, the last stage in micro-batch order.

    ``in_order``: stage s of the first ones on rank s. ``in_turn``: all stages run their forwards in micro-batch order.
    """
    placement = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    if not in_order:
        rng.shuffle(placement)
    splits = {(s, b): rng.random() < 0.5 for s in range(stages) for b in range(micro_batches)}
    waiting = {
        Action(s, op, b)
        for s in range(stages)
        for b in range(micro_batches)
        for op in ((Op.F, Op.I, Op.W) if splits[s, b] else (Op.F, Op.B))
    }
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while waiting:
        action = rng.choice(sorted(a for a in waiting if _ready(a, done, stages, in_turn)))
        waiting.remove(action)
        done.add(action)
        rows[placement[action.stage]].append(action)
    return Schedule("random", tuple(placement), tuple(map(tuple, rows)))


def _ready(action: Action, done: set[Action], stages: int, in_turn: bool) -> bool:
    stage, op, batch = action
    if op is Op.W:
        return Action(stage, Op.I, batch) in done
    if op is Op.F:
        free = batch == 0 or not (in_turn or stage == stages - 1)
        return (free or Action(stage, Op.F, batch - 1) in done) and (
            stage == 0 or Action(stage - 1, Op.F, batch) in done
        )
    later = {Action(stage + 1, Op.B, batch), Action(stage + 1, Op.I, batch)}
    return Action(stage, Op.F, batch) in done and (stage == stages - 1 or bool(later & done))


def random_pipeline(rng: random.Random) -> tuple[Schedule, list[StageCost], list[Link | None], float]:
    """Any valid table on up to four ranks, what its stages cost, the links between them, and the overhead."""
    ranks = rng.randint(1, 4)
    count = ranks + rng.randint(0, 3)
    table = random_schedule(rng, ranks=ranks, stages=count, micro_batches=rng.randint(1, 5))
    links = [Link(rng.random(), 1 + rng.random(), rng.choice([0, rng.random()])) for _ in range(count - 1)]
    hops = [None if a == b else link for link, (a, b) in zip(links, pairwise(table.placement), strict=True)]
    return table, [random_cost(rng) for _ in range(count)], hops, rng.choice([0.0, rng.random()])


def random_cost(rng: random.Random) -> StageCost:
    """A stage that takes a random time for each action and holds a few bytes of each kind."""
    names = ("static_bytes", "gradient", "held", "held_i", "workspace", "receive", "send")
    sizes = {name: rng.randint(0, 9) for name in names}
    sizes["first"] = rng.randint(sizes["held"], sizes["held"] + sizes["gradient"] + sizes["workspace"])
    seconds = {name: 0.1 + rng.random() for name in ("input_grad_s", "weight_grad_s", "optimizer_s")}
    return stage(0.1 + rng.random(), 0.1 + rng.random(), **seconds, **sizes)
