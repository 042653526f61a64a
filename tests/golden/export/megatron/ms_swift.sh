# llama.py for megatron-core 0.16, by autopipe 0.1.0
# plan <digest>
# 2 stages on 2 ranks, 1F1B, 4 micro-batches of 2, global batch 8
# predicted: 192 ms a step
PIPELINE_ARGS=(
    --pipeline_model_parallel_size 2
    --pipeline_model_parallel_layout 'Ett|t*4L'
    --micro_batch_size 2
    --global_batch_size 8
)
