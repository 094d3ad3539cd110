"""The code that is copied into every checkpoint and that all parts of ddp-vllm import.

A checkpoint must load in transformers without ddp-vllm, so `export` copies these files into it
unchanged. They import only each other, in this order: `tensors.py`, `files.py`, `widths.py`
(standard library) → `configuration_ddp.py` (transformers) → `stock_vllm.py` → `modeling_ddp.py`
(torch, dense families) → `ragged_experts.py`, `modeling_ddp_moe.py` (mixtures of experts). Models of
a stock class get `files.py`, `module_widths.py`, `ragged_experts.py` and
`configuration_ddp_widths.py` (torch) alone.
"""

from pathlib import Path

NAMES = (
    "tensors",
    "files",
    "widths",
    "configuration_ddp",
    "stock_vllm",
    "modeling_ddp",
    "ragged_experts",
    "modeling_ddp_moe",
)
FILES = tuple(Path(__file__).with_name(f"{name}.py") for name in NAMES)
WIDTHS_NAMES = ("files", "module_widths", "ragged_experts", "configuration_ddp_widths")  # of models of a stock class
WIDTHS_FILES = tuple(Path(__file__).with_name(f"{name}.py") for name in WIDTHS_NAMES)
