# llama.py for megatron-core 0.16, by autopipe 0.1.0
# plan <digest>
# 2 stages on 2 ranks, 1F1B, 4 micro-batches of 2, global batch 8
# predicted: 192 ms a step


def planned(cfg):
    """A ConfigContainer with the plan."""
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_layout = "Ett|t*4L"
    cfg.train.micro_batch_size = 2
    cfg.train.global_batch_size = 8
    return cfg
