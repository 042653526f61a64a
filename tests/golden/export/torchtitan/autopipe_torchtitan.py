# llama.py for torchtitan 0.3, by autopipe 0.1.0
# plan <digest>
# 2 stages on 2 ranks, 1F1B, 4 micro-batches of 2, global batch 8
# predicted: 192 ms a step

from dataclasses import fields
from importlib import import_module
from pathlib import Path

BASE = "torchtitan.models.llama3.config_registry:llama3_debugmodel"  # your model's configuration
MODULE_FQNS_PER_MODEL_PART = [
    ["tok_embeddings", "layers.0", "layers.1"],
    ["layers.2", "layers.3", "layers.4", "layers.5", "norm", "lm_head"],
]


def config():
    """The base configuration with the plan: torchtitan.train --module autopipe_torchtitan --config config."""
    module, _, function = BASE.partition(":")
    return planned(getattr(import_module(module), function)())


def planned(config):
    """A Trainer.Config with the plan."""
    layers = len(config.model_spec.model.layers)
    if layers != 6:
        raise ValueError(f"the plan is for a model of 6 layers, {BASE} has {layers}")
    parallelism, training = config.parallelism, config.training
    parallelism.pipeline_parallel_degree = 2
    parallelism.data_parallel_replicate_degree = 1
    parallelism.pipeline_parallel_schedule = "1F1B"  # sets which rank has which stage; the order is the file's
    parallelism.pipeline_parallel_schedule_csv = str(Path(__file__).with_name("schedule.csv"))
    parallelism.module_fqns_per_model_part = MODULE_FQNS_PER_MODEL_PART
    if "num_pp_microbatches" in names(parallelism):  # torchtitan after 0.3
        parallelism.num_pp_microbatches = 4
    else:
        parallelism.pipeline_parallel_microbatch_size = 2
    if "local_batch_size" in names(training):
        training.local_batch_size = 8
        training.global_batch_size = 8
    else:  # torchtitan after 0.3 counts tokens
        training.num_tokens_per_microbatch_per_dp_rank = 2 * training.max_context_length
        training.num_tokens_per_train_step = 8 * training.max_context_length
    training.disable_cuda_graphs = True  # torchtitan refuses them in a pipeline
    config.activation_checkpoint = None
    return config


def names(part):
    """The fields of a part of the configuration: releases differ in them."""
    return {field.name for field in fields(part)}
