# llama.py for transformers 5, by autopipe 0.1.0
# plan <digest>
# 2 stages on 2 ranks, 1F1B, 4 micro-batches of 2, global batch 8
# the split only: schedule, micro-batches, recomputation and replicas are not in this file
device_map = {
    "model.embed_tokens": 0,
    "model.layers.0": 0,
    "model.layers.1": 0,
    "model.layers.2": 1,
    "model.layers.3": 1,
    "model.layers.4": 1,
    "model.layers.5": 1,
    "model.norm": 1,
    "lm_head": 1,
}
