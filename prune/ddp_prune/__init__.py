"""The training core of ddp-vllm: it learns masks on text and writes the checkpoint that they
describe."""

import ddp_training  # noqa: F401  (before torch: it sets how threads wait)
