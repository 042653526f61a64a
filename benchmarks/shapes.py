"""Profiles that are computed, not measured: what large models cost on a device of a given speed."""

from __future__ import annotations

from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.profile import CostTable, Edge, Layer, LayerCost, Profile

SEQUENCE, VOCABULARY = 2048, 50257
RATE = 150e12
"""Floating point operations a second that a large matrix product reaches."""
LAUNCH_S = 20e-6
"""What a layer costs beyond its operations: small micro-batches are dearer a sample."""


def gpt(layers: int, width: int = 12288, micro_batches: tuple[int, ...] = (1, 2, 4, 8)) -> Profile:
    """A GPT of an embedding, ``layers`` − 2 blocks and a head; 4 bytes a parameter, 2 bytes an activation.

    A block has 12 width² parameters and keeps 34 bytes for each token and unit of width (Korthikanti et al., 2022,
    arXiv 2205.05198, with the attention matrix recomputed). The backward takes twice the forward.
    """
    block, table = 12 * width**2, VOCABULARY * width
    parameters = [table, *[block] * (layers - 2), table]
    names = ["embedding", *(f"blocks.{i}" for i in range(layers - 2)), "head"]
    edges = [Edge("tokens", None, (0,), ("b", SEQUENCE), "int64", needs_gradient=False)]
    edges += [Edge(f"x{i}", i, (i + 1,), ("b", SEQUENCE, width), "bfloat16") for i in range(layers - 1)]
    return Profile(
        model=f"gpt-{layers}",
        layers=tuple(Layer(n, 4 * p, p, (n,)) for n, p in zip(names, parameters, strict=True)),
        edges=tuple(edges),
        costs=tuple(CostTable(b, tuple(_costs(layers, width, b))) for b in micro_batches),
        device="declared",
        dtype="float32",
        origin="declared",
    )


def _costs(layers: int, width: int, micro_batch: int) -> list[LayerCost]:
    tokens = micro_batch * SEQUENCE
    block, table = 12 * width**2, VOCABULARY * width
    attention = 2 * SEQUENCE * width  # a causal one: half of the products of queries and keys, and with values
    embedding = _cost(tokens * width * 8 / 2e12, 2 * tokens * width, tokens * width * 2, table)
    one = _cost(2 * tokens * (block + attention) / RATE, 34 * tokens * width, tokens * width * 2, block)
    head = _cost(2 * tokens * table / RATE, tokens * (2 * width + 4 * VOCABULARY), 4 * tokens * VOCABULARY, table)
    return [embedding, *[one] * (layers - 2), head]


def _cost(forward_s: float, held: int, output: int, parameters: int) -> LayerCost:
    forward_s += LAUNCH_S
    return LayerCost(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        input_grad_s=forward_s,
        weight_grad_s=forward_s,
        held_after_forward_bytes=held,
        held_after_input_grad_bytes=held // 2,
        output_bytes=output,
        optimizer_s=16 * parameters / 1.5e12,
    )


def racks(devices: int, memory_bytes: int, *, node: int = 8) -> Cluster:
    """Nodes of eight devices over a fast link, and the nodes over a slower one."""
    tiers = [Tier("NVLink", node, Link(5e-6, 250e9)), Tier("InfiniBand", max(devices, node), Link(15e-6, 25e9))]
    return Cluster(f"{devices} devices", (Device("declared", memory_bytes, devices),), tuple(tiers))
