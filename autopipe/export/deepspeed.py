"""DeepSpeed: a PipelineModule that cuts where the plan cuts, and a configuration.

PipelineModule has no argument for bounds; a subclass that sets them is the way. It runs 1F1B, one stage a rank.
Clipping is written out: its default of 1.0 makes results differ between splits.
"""

from __future__ import annotations

import json

from autopipe.core.errors import CannotExport
from autopipe.core.plan import Plan
from autopipe.export.coverage import check_pipeline
from autopipe.export.names import recomputes_blocks
from autopipe.export.text import comment, plain, quoted
from autopipe.export.trainer import Files, Heading, exporter

_MODULE = '''
from deepspeed.pipe import PipelineModule

BOUNDS = {bounds}  # the first layer of each stage, and how many there are
LAYERS = [
{layers}]  # what your list of layers must hold, in this order{ties}


class PlannedPipeline(PipelineModule):
    """A PipelineModule with the plan's stages: PlannedPipeline(layers, num_stages={stages}, loss_fn=…)."""

    def __init__(self, layers, *, num_stages={stages}, activation_checkpoint_interval={interval}, **options):
        if len(layers) != {count} or num_stages != {stages}:
            raise ValueError(f"the plan: {count} layers on {stages} stages, here: {{len(layers)}} on {{num_stages}}")
        super().__init__(
            layers,
            num_stages=num_stages,
            activation_checkpoint_interval=activation_checkpoint_interval,
            **options,
        )

    def _partition_layers(self, method="uniform"):
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = BOUNDS
        self._set_bounds(start=BOUNDS[stage], stop=BOUNDS[stage + 1])
'''


@exporter("deepspeed", target="DeepSpeed 0.19", stock=lambda plan: "1F1B", masters=True, shares=True, averages=True)
def deepspeed(plan: Plan, heading: Heading) -> Files:
    """``deepspeed_pipeline.py`` and ``ds_config.json``. Raises CannotExport for more than one stage a rank."""
    check_pipeline(plan, "deepspeed")
    if len(plan.stages) != plan.depth:
        raise CannotExport(
            f"deepspeed has one stage a rank; the plan has {len(plan.stages)} on {plan.depth}: plan with one"
        )
    names = [name for stage in plan.stages for name in stage.layers]
    ties = "".join(f"\n# tied: {plain(tie.name)}: use TiedLayerSpec for the layers that hold it" for tie in plan.ties)
    module = _MODULE.format(
        bounds=[stage.start for stage in plan.stages] + [len(names)],
        layers="".join(f"    {quoted(name)},\n" for name in names),
        ties=ties,
        stages=len(plan.stages),
        count=len(names),
        interval=int(recomputes_blocks(plan)),
    )
    settings: dict[str, object] = {
        "autopipe": list(heading),
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "gradient_clipping": 0.0,
    }
    if plan.update.shards > 1:
        settings["zero_optimization"] = {"stage": 1}
    if plan.master_weights:
        settings["bf16" if plan.dtype == "bfloat16" else "fp16"] = {"enabled": True}
    return {
        "deepspeed_pipeline.py": comment(heading) + module,
        "ds_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }
