"""Megatron: one layout, in the spellings of Megatron-LM, Megatron-Bridge and ms-swift.

It runs 1F1B, or its interleaved form with stages placed in a loop. With two ranks the interleaved one needs
overlapping transfers: without them it is wrong in silence.
"""

from __future__ import annotations

import shlex

from autopipe.core.errors import CannotExport
from autopipe.core.plan import Plan
from autopipe.export.coverage import check_pipeline
from autopipe.export.megatron_layout import write_layout
from autopipe.export.names import Part, Role, recomputes_blocks, stage_parts
from autopipe.export.text import comment
from autopipe.export.trainer import Files, Heading, exporter

_LETTERS = {Role.EMBEDDING: "E", Role.POSITIONS: "E", Role.BLOCK: "t", Role.NORM: "L", Role.HEAD: "L"}
_RECOMPUTE: dict[str, str | int] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def _stock(plan: Plan) -> str:
    return "1F1B" if len(plan.stages) == plan.depth else "Interleaved1F1B"


@exporter("megatron", target="megatron-core 0.16", stock=_stock, masters=True, shares=True)
def megatron(plan: Plan, heading: Heading) -> Files:
    """``megatron_lm.sh``, ``megatron_bridge.py`` and ``ms_swift.sh``. Raises CannotExport as ``layout`` does."""
    check_pipeline(plan, "megatron")
    model: dict[str, str | int] = {
        "pipeline_model_parallel_size": plan.depth,
        "pipeline_model_parallel_layout": layout(plan),
    }
    if recomputes_blocks(plan):
        model |= _RECOMPUTE
    options = model | {"micro_batch_size": plan.micro_batch, "global_batch_size": plan.global_batch}
    lines = "".join(f"    --{name} {shlex.quote(str(value))}\n" for name, value in options.items())
    shared = plan.update.shards > 1
    flag, swift = (
        ("    --use-distributed-optimizer\n", "    --use_distributed_optimizer true\n") if shared else ("", "")
    )
    return {
        "megatron_lm.sh": f"{comment(heading)}PIPELINE_ARGS=(\n{lines.replace('_', '-')}{flag})\n",
        "ms_swift.sh": f"{comment(heading)}PIPELINE_ARGS=(\n{lines}{swift})\n",
        "megatron_bridge.py": f"{comment(heading)}{_bridge(plan, model)}",
    }


def _bridge(plan: Plan, model: dict[str, str | int]) -> str:
    if len(plan.stages) > plan.depth:
        model = model | {
            "virtual_pipeline_model_parallel_size": len(plan.stages) // plan.depth,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    lines = "".join(f"    cfg.model.{name} = {value!r}\n" for name, value in model.items())
    if plan.update.shards > 1:
        lines += "".join(f"    cfg.{part}.use_distributed_optimizer = True\n" for part in ("ddp", "optimizer"))
    return f'''

def planned(cfg):
    """A ConfigContainer with the plan."""
{lines.replace("'", '"')}    cfg.train.micro_batch_size = {plan.micro_batch}
    cfg.train.global_batch_size = {plan.global_batch}
    return cfg
'''


def layout(plan: Plan) -> str:
    """The plan's stages as a layout. Raises CannotExport where E or L would have to be on two stages."""
    parts = stage_parts(plan, "megatron")
    for letter in "EL":
        _check_together([(s, part) for s, stage in enumerate(parts) for part in stage if _LETTERS[part.role] == letter])
    return write_layout(tuple(map(_spelt, parts)))


def _check_together(holders: list[tuple[int, Part]]) -> None:
    if not holders:
        raise CannotExport("megatron needs an embedding and a head; the plan's layers lack one")
    (first, one), (last, other) = holders[0], holders[-1]
    if first != last:
        raise CannotExport(
            f"megatron keeps {one.layer!r} and {other.layer!r} on one stage; the plan has them on {first} and {last}: "
            f"plan with --pin {one.layer}={last} --pin {other.layer}={last}"
        )


def _spelt(stage: tuple[Part, ...]) -> str:
    """A letter a block, and one for the embeddings and for norm and head together."""
    letters = "".join(_LETTERS[part.role] for part in stage)
    return "E" * ("E" in letters) + "t" * letters.count("t") + "L" * ("L" in letters)
