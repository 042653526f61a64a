"""What a layer is, by its name, and so what each trainer calls it.

A transformer is embeddings, then numbered blocks, then a final norm and a head: ``model.layers.3`` is block 3, which
torchtitan calls ``layers.3`` and Megatron ``t``.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from autopipe.core.blocks import block_number
from autopipe.core.errors import CannotExport
from autopipe.core.plan import Plan


class Role(Enum):
    """What a layer does in a transformer."""

    EMBEDDING = "embedding"
    POSITIONS = "positions"
    BLOCK = "block"
    NORM = "final norm"
    HEAD = "head"


_ROLES = {
    Role.EMBEDDING: ("embed_tokens", "tok_embeddings", "wte", "word_embeddings", "embed_in", "tok_emb", "embedding"),
    Role.POSITIONS: ("wpe", "embed_positions", "position_embeddings", "pos_emb"),
    Role.NORM: ("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "final_norm"),
    Role.HEAD: ("lm_head", "output", "embed_out", "head", "output_layer"),
}
_BY_NAME = {name: role for role, names in _ROLES.items() for name in names}
_ORDER = (Role.EMBEDDING, Role.POSITIONS, Role.BLOCK, Role.NORM, Role.HEAD)


class Part(NamedTuple):
    """A layer of a transformer: its name in the model, its role, and its number among the blocks."""

    layer: str
    role: Role
    block: int = 0


def role_of(layer: str) -> Role | None:
    """What a layer does, by the last part of its name; None where the name says nothing."""
    if block_number(layer) is not None:
        return Role.BLOCK
    return _BY_NAME.get(layer.rpartition(".")[2])


def parts(layers: tuple[str, ...], trainer: str) -> tuple[Part, ...]:
    """The layers as parts of a transformer.

    Raises CannotExport that names a layer without a role, one out of a transformer's order, or a gap in the blocks.
    """
    found: list[Part] = []
    _check_numbers([layer for layer in layers if is_block(layer)], trainer)
    for layer in layers:
        role = role_of(layer)
        if role is None:
            raise CannotExport(
                f"layer {layer!r} has no name in {trainer}, which knows embeddings, numbered blocks, a final norm and "
                f"a head: rename it in the model"
            )
        if found and _ORDER.index(role) < _ORDER.index(found[-1].role):
            raise CannotExport(
                f"layer {layer!r} ({role.value}) comes behind {found[-1].layer!r} ({found[-1].role.value}): "
                f"{trainer} runs embeddings, blocks, final norm and head in this order"
            )
        found.append(Part(layer, role, block_number(layer) or 0))
    return tuple(found)


def _check_numbers(blocks: list[str], trainer: str) -> None:
    """Raise CannotExport unless the blocks are 0, 1, 2, … of one list."""
    for number, block in enumerate(blocks):
        if block_number(block) != number or block.rpartition(".")[0] != blocks[0].rpartition(".")[0]:
            raise CannotExport(
                f"block {block!r} comes where number {number} of {blocks[0].rpartition('.')[0]!r} is due: "
                f"{trainer} knows one list of blocks, in order. Is one misspelt, or the model no such transformer?"
            )


def stage_parts(plan: Plan, trainer: str) -> tuple[tuple[Part, ...], ...]:
    """The parts of every stage. Raises CannotExport as ``parts`` does."""
    every = parts(tuple(name for stage in plan.stages for name in stage.layers), trainer)
    return tuple(every[stage.start : stage.stop] for stage in plan.stages)


def is_block(layer: str) -> bool:
    """Whether a layer is a numbered block."""
    return block_number(layer) is not None


def recomputes_blocks(plan: Plan) -> bool:
    """Whether any block recomputes: where a trainer knows all or none, all do."""
    return any(map(is_block, (layer for stage in plan.stages for layer in stage.recompute)))
