"""torchtitan: a module whose function ``config`` gives its Trainer.Config, and torch's CSV of the table.

Its models have ``tok_embeddings``, ``layers.N``, ``norm`` and ``lm_head``. It drops a name that it does not know
without a word, so the module compares the number of layers. The schedule's name sets which rank has which stage. Its
default recomputation fails where backwards are split: the module sets full or none.
"""

from __future__ import annotations

from string import Template

from autopipe.core.errors import CannotExport
from autopipe.core.plan import Plan
from autopipe.export.coverage import check_pipeline
from autopipe.export.names import Part, Role, recomputes_blocks, stage_parts
from autopipe.export.text import comment, literal, placement, schedule_csv
from autopipe.export.trainer import Files, Heading, exporter

_NAMES = {Role.EMBEDDING: "tok_embeddings", Role.NORM: "norm", Role.HEAD: "lm_head"}
_SCHEDULES = {"loop": ("1F1B", "Interleaved1F1B"), "v": ("ZBVZeroBubble", "ZBVZeroBubble")}
_MODULE = Template('''$heading
from dataclasses import fields
from importlib import import_module
from pathlib import Path

from torchtitan.distributed.activation_checkpoint import FullAC

BASE = "torchtitan.models.llama3.config_registry:llama3_debugmodel"  # your model's configuration
MODULE_FQNS_PER_MODEL_PART = [
$parts]


def config():
    """The base configuration with the plan: torchtitan.train --module $module --config config."""
    module, _, function = BASE.partition(":")
    return planned(getattr(import_module(module), function)())


def planned(config):
    """A Trainer.Config with the plan."""
    layers = len(config.model_spec.model.layers)
    if layers != $layers:
        raise ValueError(f"the plan is for a model of $layers layers, {BASE} has {layers}")
    parallelism, training = config.parallelism, config.training
    parallelism.pipeline_parallel_degree = $ranks
    parallelism.data_parallel_replicate_degree = $replicas
    parallelism.pipeline_parallel_schedule = "$schedule"  # sets which rank has which stage; the order is the file's
    parallelism.pipeline_parallel_schedule_csv = str(Path(__file__).with_name("schedule.csv"))
    parallelism.module_fqns_per_model_part = MODULE_FQNS_PER_MODEL_PART
    if "num_pp_microbatches" in names(parallelism):  # torchtitan after 0.3
        parallelism.num_pp_microbatches = $micro_batches
    else:
        parallelism.pipeline_parallel_microbatch_size = $micro_batch
    if "local_batch_size" in names(training):
        training.local_batch_size = $local_batch
        training.global_batch_size = $global_batch
    else:  # torchtitan after 0.3 counts tokens
        training.num_tokens_per_microbatch_per_dp_rank = $micro_batch * training.max_context_length
        training.num_tokens_per_train_step = $global_batch * training.max_context_length
    training.disable_cuda_graphs = True  # torchtitan refuses them in a pipeline
    config.activation_checkpoint = $recompute
    return config


def names(part):
    """The fields of a part of the configuration: releases differ in them."""
    return {field.name for field in fields(part)}
''')


@exporter("torchtitan", target="torchtitan 0.3")
def torchtitan(plan: Plan, heading: Heading) -> Files:
    """``autopipe_torchtitan.py`` and ``schedule.csv``. Raises CannotExport for ties and names without a place."""
    check_pipeline(plan, "torchtitan")
    if plan.ties:
        raise CannotExport(
            f"torchtitan keeps no parameter on two stages: {plan.ties[0].name!r} is on stages "
            f"{', '.join(map(str, plan.ties[0].stages))}. Untie it in the model and plan again"
        )
    parts = stage_parts(plan, "torchtitan")
    text = _MODULE.substitute(
        heading=comment(heading),
        parts=literal([[*map(module_name, stage)] for stage in parts], "    "),
        module="autopipe_torchtitan",
        layers=sum(part.role is Role.BLOCK for stage in parts for part in stage),
        ranks=plan.depth,
        schedule=_SCHEDULES[placement(plan, "torchtitan")][len(plan.stages) > plan.depth],
        micro_batch=plan.micro_batch,
        micro_batches=plan.micro_batches,
        replicas=plan.replicas,
        local_batch=plan.micro_batch * plan.micro_batches,
        global_batch=plan.global_batch,
        recompute="FullAC.Config()" if recomputes_blocks(plan) else "None",
    )
    if "FullAC.Config" not in text:
        text = text.replace("from torchtitan.distributed.activation_checkpoint import FullAC\n\n", "")
    return {"autopipe_torchtitan.py": text, "schedule.csv": schedule_csv(plan)}


def module_name(part: Part) -> str:
    """What torchtitan calls a layer. Raises CannotExport where its models have none."""
    if part.role is Role.BLOCK:
        return f"layers.{part.block}"
    if part.role not in _NAMES:
        raise CannotExport(f"layer {part.layer!r} ({part.role.value}) has no name in torchtitan's models")
    return _NAMES[part.role]
