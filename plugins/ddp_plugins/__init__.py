"""What vLLM loads to serve pruned checkpoints; nothing here imports `ddp_prune` or `ddp_benchmarks`.

Reading order: `register.py` (what vLLM is told at start) → `tensor_parallel.py` (the widths on several devices)
→ `dense.py` (decoder layers with their own widths, one row a family) → `moe.py` (mixtures of experts, one row a
family) → `moe_layer.py` (their routed experts inside vLLM) → `moe_experts.py` (packed weights, the operator and, by
device, its kernels).
"""
