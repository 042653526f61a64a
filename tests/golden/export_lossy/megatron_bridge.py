# synthetic for megatron-core 0.16, by autopipe 0.1.0
# plan <digest>
# 4 stages on 2 ranks, V, 4 micro-batches of 2, global batch 8
# not expressed: schedule V: megatron runs Interleaved1F1B
# not expressed: placement 0 1 1 0: megatron has stages on ranks 0 1 0 1
# not expressed: recomputation of 2 of 9 layers: megatron recomputes all blocks or none, here all
# predicted for what remains: 186 ms a step (+7.3 %); the plan: 174 ms


def planned(cfg):
    """A ConfigContainer with the plan."""
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_layout = "Et|tt|tt|tL"
    cfg.model.recompute_granularity = "full"
    cfg.model.recompute_method = "uniform"
    cfg.model.recompute_num_layers = 1
    cfg.model.virtual_pipeline_model_parallel_size = 2
    cfg.model.overlap_p2p_comm = True
    cfg.model.batch_p2p_comm = False
    cfg.train.micro_batch_size = 2
    cfg.train.global_batch_size = 8
    return cfg
