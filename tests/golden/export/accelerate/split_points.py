# llama.py for accelerate 1.15, by autopipe 0.1.0
# plan <digest>
# 2 stages on 2 ranks, 1F1B, 4 micro-batches of 2, global batch 8
# the split only: schedule, micro-batches, recomputation and replicas are not in this file
split_points = ["model.layers.2"]
num_chunks = 4
