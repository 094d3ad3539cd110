"""The steps after pruning: recover the lost quality, measure it on any text, and quantize the
model."""

import ddp_training  # noqa: F401  (before torch: it sets how threads wait)
