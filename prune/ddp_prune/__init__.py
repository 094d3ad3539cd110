"""Learns which units a model can do without, removes them, and recovers what that cost.

Rooms: `core` (what the paper describes, in memory), `models` (language models on disk), `text` (any
text in, blocks of tokens out).
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
