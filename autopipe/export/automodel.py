"""NVIDIA NeMo AutoModel: the ``distributed`` section of a recipe, and torch's CSV of the table.

Its models are transformers' own, with ``model.embed_tokens``, ``model.layers.N``, ``model.norm`` and ``lm_head``. It
drops names that it does not know, and every stage must list the rotary embedding.
"""

from __future__ import annotations

from autopipe.core.errors import CannotExport
from autopipe.core.plan import Plan
from autopipe.export.coverage import check_pipeline
from autopipe.export.names import Part, Role, recomputes_blocks, stage_parts
from autopipe.export.text import comment, literal, placement, schedule_csv
from autopipe.export.trainer import Files, Heading, exporter

_NAMES = {Role.EMBEDDING: "model.embed_tokens", Role.NORM: "model.norm", Role.HEAD: "lm_head"}
_SCHEDULES = {"loop": ("1F1B", "Interleaved1F1B"), "v": ("ZBVZeroBubble", "ZBVZeroBubble")}


@exporter("automodel", target="NeMo AutoModel 0.7", shares=True)
def automodel(plan: Plan, heading: Heading) -> Files:
    """``pipeline.yaml`` and ``schedule.csv``. Raises CannotExport for what has no place."""
    check_pipeline(plan, "automodel")
    if plan.ties:
        raise CannotExport(
            f"automodel refuses parameters that stages share: {plan.ties[0].name!r} is on stages "
            f"{', '.join(map(str, plan.ties[0].stages))}. Untie it in the model's config and plan again"
        )
    if plan.micro_batches < plan.depth:
        raise CannotExport(
            f"automodel wants at least as many micro-batches as ranks, the plan has {plan.micro_batches} on "
            f"{plan.depth}: plan with a smaller --micro-batch or --depth"
        )
    names = [[*map(_name, stage), "model.rotary_emb"] for stage in stage_parts(plan, "automodel")]
    schedule = _SCHEDULES[placement(plan, "automodel")][len(plan.stages) > plan.depth]
    recomputes = str(recomputes_blocks(plan)).lower()
    body = f"""distributed:
  strategy: fsdp2
  pp_size: {plan.depth}
  dp_size: {plan.replicas}
  activation_checkpointing: {recomputes}
  pipeline:
    pp_schedule: {schedule}  # sets which rank has which stage; the order is the file's
    pp_schedule_csv: schedule.csv  # as seen from the working directory
    pp_microbatch_size: {plan.micro_batch}
    pp_batch_size: {plan.micro_batch * plan.micro_batches}
    scale_grads_in_schedule: false
    module_fqns_per_model_part:
{literal(names, "      - ").replace("],", "]")}step_scheduler:
  local_batch_size: {plan.micro_batch * plan.micro_batches}
  global_batch_size: {plan.global_batch}
"""
    return {"pipeline.yaml": comment(heading) + body, "schedule.csv": schedule_csv(plan)}


def _name(part: Part) -> str:
    if part.role is Role.BLOCK:
        return f"model.layers.{part.block}"
    if part.role not in _NAMES:
        raise CannotExport(f"layer {part.layer!r} ({part.role.value}) has no name in automodel's models")
    return _NAMES[part.role]
