# llama.py for megatron-core 0.16, by autopipe 0.1.0
# plan <digest>
# 2 stages on 2 ranks, 1F1B, 4 micro-batches of 2, global batch 8
# predicted: 192 ms a step
PIPELINE_ARGS=(
    --pipeline-model-parallel-size 2
    --pipeline-model-parallel-layout 'Ett|t*4L'
    --micro-batch-size 2
    --global-batch-size 8
)
