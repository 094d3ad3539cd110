"""Training that pruning and recovery share: loss, weights, devices, and the loop that saves and
resumes a run.

It imports only `ddp_vllm`; gates and budgets are in `ddp_prune`.
"""

import logging
import os

# Before torch is imported: OpenMP threads that spin while they wait slow a step several times over
# as soon as another process needs the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# torchao, which transformers imports too, would warn of GPU kernels that training does not use.
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
