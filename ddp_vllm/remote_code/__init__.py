"""The code that is copied into checkpoints and that all parts of ddp-vllm import.

A checkpoint must load in transformers without ddp-vllm, so `export` copies these files into it
unchanged. They import only each other. All get `tensors.py`, `files.py` and `widths.py` (standard
library). Families whose heads are pruned also get `configuration_ddp.py` (transformers) →
`stock_vllm.py` → `modeling_ddp.py` (torch). Models of a stock class also get `ragged_experts.py`
and `configuration_ddp_widths.py` (torch), and DeepSeekMoE v1, which has no stock class,
`modeling_deepseek.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .widths import states_widths

NAMES = ("tensors", "files", "widths", "configuration_ddp", "stock_vllm", "modeling_ddp")
WIDTHS_NAMES = ("tensors", "files", "widths", "ragged_experts", "configuration_ddp_widths")  # of a stock class
DEEPSEEK = "deepseek"  # the model type of DeepSeekMoE v1


def code_of(config: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the files that a checkpoint with this config contains."""
    names: tuple[str, ...] = NAMES if "ddp_layers" in config else WIDTHS_NAMES if states_widths(config) else ()
    if names == WIDTHS_NAMES and config.get("model_type") == DEEPSEEK:
        names += ("modeling_deepseek",)
    return tuple(Path(__file__).with_name(f"{name}.py") for name in names)
