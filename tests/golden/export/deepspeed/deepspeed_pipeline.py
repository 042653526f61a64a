# llama.py for DeepSpeed 0.19, by autopipe 0.1.0
# plan <digest>
# 2 stages on 2 ranks, 1F1B, 4 micro-batches of 2, global batch 8
# predicted: 192 ms a step

from deepspeed.pipe import PipelineModule

BOUNDS = [0, 3, 9]  # the first layer of each stage, and how many there are
LAYERS = [
    "model.embed_tokens",
    "model.layers.0",
    "model.layers.1",
    "model.layers.2",
    "model.layers.3",
    "model.layers.4",
    "model.layers.5",
    "model.norm",
    "lm_head",
]  # what your list of layers must hold, in this order


class PlannedPipeline(PipelineModule):
    """A PipelineModule with the plan's stages: PlannedPipeline(layers, num_stages=2, loss_fn=…)."""

    def __init__(self, layers, *, num_stages=2, activation_checkpoint_interval=0, **options):
        if len(layers) != 9 or num_stages != 2:
            raise ValueError(f"the plan: 9 layers on 2 stages, here: {len(layers)} on {num_stages}")
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
