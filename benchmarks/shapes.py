"""Profiles that are computed, not measured: what large models cost on a device of a given speed."""

from __future__ import annotations

import random

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


HEADS = {
    "Llama3-8B": (32, 2.2),
    "Llama3-70B": (80, 1.2),
    "GPT2-XL": (48, 2.6),
    "Mistral-7B": (32, 0.6),
    "Qwen2.5-0.5B": (24, 9.1),
    "Gemma3-1B": (26, 11.0),
}
"""Language models by their number of blocks and by their head's work in blocks."""

BLOCK_BYTES = 1 << 20
"""What a block of these holds of a micro-batch."""


def headed(blocks: int, head: float, *, halves: bool = False, seed: int = 0) -> Profile:
    """A language model with costs in blocks: F 1, I 1, W ⅔, each with 3 % of noise, and activations of 1.

    The embedding is nearly free, the head takes ``head`` blocks. ``halves`` cuts a block into attention, a third of it,
    and what follows. Between I and W half as much again as after F is held, as torch's own split backward does.
    Parameters take no memory, only their number counts.
    """
    rng = random.Random(seed)
    parts = {"attention": 1 / 3, "mlp": 2 / 3} if halves else {"": 1.0}
    rows = [("embedding", (0.1, 0.01, 0.1), 0.2, head)]
    for number in range(blocks):
        noise = [1 + rng.uniform(-0.03, 0.03) for _ in range(3)]
        for name, part in parts.items():
            work = (part * noise[0], part * noise[1], part * 0.67 * noise[2])
            rows.append((f"blocks.{number}{'.' * bool(name)}{name}", work, part, part))
    rows.append(("head", (head, head, 0.67 * head), max(0.2, 0.15 * head), head))
    edges = [Edge("tokens", None, (0,), ("b",), "int64", needs_gradient=False)]
    edges += [Edge(f"x{i}", i, (i + 1,), ("b",), "uint8") for i in range(len(rows) - 1)]
    return Profile(
        model=f"{blocks} blocks, head {head}",
        layers=tuple(Layer(name, 0, round(1e6 * size), (name,)) for name, _, _, size in rows),
        edges=tuple(edges),
        costs=(CostTable(1, tuple(_part(work, held) for _, work, held, _ in rows)),),
        device="declared",
        dtype="float32",
        optimizer="sgd",
        origin="declared",
    )


def _part(work: tuple[float, float, float], held: float) -> LayerCost:
    forward_s, input_grad_s, weight_grad_s = (seconds * 1e-3 for seconds in work)
    return LayerCost(
        forward_s=forward_s,
        backward_s=input_grad_s + weight_grad_s,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
        held_after_forward_bytes=round(held * BLOCK_BYTES),
        held_after_input_grad_bytes=round(1.5 * held * BLOCK_BYTES),
        output_bytes=1,
    )


def vision_language(micro_batches: tuple[int, ...] = (1,)) -> Profile:
    """A picture of 576 patches through 24 blocks 1,024 wide, then with 2,048 words through 16 blocks 3,072 wide.

    The patches are projected to the width of the text and put before it, and the head has ``VOCABULARY`` words. So a
    block of the second tower takes tens of times as long as one of the first, and holds about ten times as much.
    """
    narrow, wide, patches, words = 1024, 3072, 576, 576 + SEQUENCE

    def rows(batch: int) -> list[LayerCost]:
        seen, read = batch * patches, batch * words
        projector, table = narrow * wide + wide * wide, VOCABULARY * wide
        return [
            _cost(2 * seen * 3 * 14 * 14 * narrow / RATE, 2 * seen * narrow, 2 * seen * narrow, 588 * narrow),
            *[_block(seen, patches, narrow)] * 24,
            _cost(2 * seen * projector / RATE, 4 * seen * wide, 2 * seen * wide, projector),
            _cost(8 * read * wide / 2e12, 2 * read * wide, 2 * read * wide, table),
            *[_block(read, words, wide)] * 16,
            _cost(2 * read * table / RATE, read * (2 * wide + 4 * VOCABULARY), 4 * read * VOCABULARY, table),
        ]

    names = [
        "patches",
        *(f"vision.{i}" for i in range(24)),
        "projector",
        "embedding",
        *(f"language.{i}" for i in range(16)),
        "head",
    ]
    widths = [*[(patches, narrow)] * 25, (patches, wide), *[(words, wide)] * 17]
    edges = [
        Edge("pixels", None, (0,), ("b", 3, 336, 336), "bfloat16", needs_gradient=False),
        Edge("tokens", None, (26,), ("b", SEQUENCE), "int64", needs_gradient=False),
    ]
    edges += [Edge(f"x{i}", i, (i + 1,), ("b", *shape), "bfloat16") for i, shape in enumerate(widths)]
    sizes = [588 * narrow, *[12 * narrow**2] * 24, narrow * wide + wide**2]
    sizes += [VOCABULARY * wide, *[12 * wide**2] * 16, VOCABULARY * wide]
    return Profile(
        model="vision-language",
        layers=tuple(Layer(n, 4 * p, p, (n,)) for n, p in zip(names, sizes, strict=True)),
        edges=tuple(edges),
        costs=tuple(CostTable(batch, tuple(rows(batch))) for batch in micro_batches),
        device="declared",
        dtype="float32",
        origin="declared",
    )


def _block(tokens: int, length: int, width: int) -> LayerCost:
    """A transformer's block whose tokens all see each other; see gpt."""
    parameters, attention = 12 * width**2, 2 * length * width
    work = 2 * tokens * (parameters + attention) / RATE
    return _cost(work, 34 * tokens * width, 2 * tokens * width, parameters)
