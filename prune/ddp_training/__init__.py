"""Training that pruning and recovery share: loss, weights, devices, and the loop that saves and resumes a run.

It imports only `ddp_vllm`; gates and budgets are `ddp_prune`'s.
"""
