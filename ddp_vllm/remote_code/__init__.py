"""The files that travel inside a checkpoint, and are used in place by every part.

A checkpoint must load in plain transformers with no ddp-vllm installed, so these files are copied into it as they are
and import nothing of ours but each other, in this order: `tensors.py`, `files.py`, `widths.py` (standard library) →
`configuration_ddp.py` (transformers) → `stock_vllm.py` → `modeling_ddp.py` (torch, dense families) →
`modeling_ddp_moe.py` (mixtures of experts).
"""

from pathlib import Path

NAMES = ("tensors", "files", "widths", "configuration_ddp", "stock_vllm", "modeling_ddp", "modeling_ddp_moe")
FILES = tuple(Path(__file__).with_name(f"{name}.py") for name in NAMES)
