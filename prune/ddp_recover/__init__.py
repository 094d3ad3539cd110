"""After pruning: the removed quality recovered and measured, and the model quantized."""

import ddp_training  # noqa: F401  (before torch: it sets how threads wait)
