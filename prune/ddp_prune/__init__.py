"""The training core of ddp-vllm."""

import os

# Before torch is imported: OpenMP threads that spin while they wait slow a step several times over as soon as another
# process needs the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
