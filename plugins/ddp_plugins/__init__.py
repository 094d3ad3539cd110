"""What vLLM loads to serve pruned checkpoints; nothing here imports `ddp_prune` or `ddp_benchmarks`.

ARCHITECTURE.md has the reading order.
"""
