"""Training that pruning and recovery share: loss, weights, devices, and the loop that saves and resumes a run.

It imports only `ddp_vllm`; gates and budgets are `ddp_prune`'s.
"""

import os

# Before torch is imported: OpenMP threads that spin while they wait slow a step several times over as soon as another
# process needs the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
