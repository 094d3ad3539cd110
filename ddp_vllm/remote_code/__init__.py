"""The code that is copied into checkpoints and that all parts of ddp-vllm import.

A checkpoint must load in transformers without ddp-vllm, so `export` copies these files into it
unchanged. They import only each other. All get `tensors.py`, `files.py` and `widths.py` (standard
library). Families whose heads are pruned also get `configuration_ddp.py` (transformers) →
`stock_vllm.py` → `modeling_ddp.py` (torch). Models of a stock class also get `ragged_experts.py`
and `configuration_ddp_widths.py` (torch), and DeepSeekMoE v1, which has no stock class,
`modeling_deepseek.py`.
"""
