"""The training core of ddp-vllm: masks learned on text, and the checkpoint that they make."""

import ddp_training  # noqa: F401  (before torch: it sets how threads wait)
