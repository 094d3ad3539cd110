"""The paper's own numbers, to be shown beside ours where the same dense model was pruned and nowhere else.

From tables "dense", "moe", "qwen3_dense_ours", "speedup_dense" and "speedup_moe" of arXiv:2603.08065. Its perplexities
are left out on purpose: they are per token, ours from lm-eval are per word, and the two can't be compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """What the paper reports for one dense model."""

    title: str
    num_tasks: int = 9
    """Tasks in the mean: seven for LLaMA, nine for the others."""
    accuracy: Mapping[float, float]
    """Sparsity -> mean zero-shot accuracy in percent."""
    speedup: Mapping[float, float] = field(default_factory=dict)
    """Sparsity -> requests/s over those of the dense model."""
    gpu: str = ""
    """What the speedup was measured on."""


_PAPER = {  # last part of the hub name, lower case, `-hf` left out
    "llama-7b": PaperModel(
        title="LLaMA-7B", num_tasks=7, accuracy={0: 65.96, 0.2: 64.13, 0.5: 56.07},
        speedup={0: 1.0, 0.2: 1.36, 0.5: 2.20}, gpu="RTX 5090",
    ),
    "llama-13b": PaperModel(
        title="LLaMA-13B", num_tasks=7, accuracy={0: 68.79, 0.2: 66.89, 0.5: 62.14},
        speedup={0: 1.0, 0.2: 1.18, 0.5: 1.42}, gpu="B200",
    ),
    "llama-2-7b": PaperModel(title="LLaMA-2-7B", num_tasks=7, accuracy={0: 66.63, 0.2: 64.82, 0.5: 56.70}),
    "qwen3-32b": PaperModel(title="Qwen3-32B", accuracy={0: 72.12, 0.2: 71.09, 0.5: 66.48}),
    "qwen3-14b": PaperModel(title="Qwen3-14B", accuracy={0: 71.61, 0.2: 70.67, 0.5: 58.49}),
    "qwen3-8b": PaperModel(title="Qwen3-8B", accuracy={0: 68.04, 0.2: 65.89, 0.5: 51.82}),
    "qwen3-4b": PaperModel(title="Qwen3-4B", accuracy={0: 65.38, 0.2: 62.99, 0.5: 47.63}),
    "deepseek-moe-16b-base": PaperModel(
        title="DeepSeekMoE-16B-Base", accuracy={0: 62.28, 0.2: 61.84, 0.4: 60.38, 0.6: 58.18}
    ),
    "qwen3-30b-a3b": PaperModel(
        title="Qwen3-30B-A3B", accuracy={0: 71.08, 0.2: 70.04, 0.4: 67.65, 0.6: 63.35},
        speedup={0: 1.0, 0.2: 1.11, 0.4: 1.25, 0.6: 1.51}, gpu="B200",
    ),
}  # fmt: skip


def paper_model(dense: str) -> PaperModel | None:
    """Return what the paper reports for a dense model, by its folder or hub name; None for any other model."""
    name = dense.rstrip("/").rpartition("/")[2].lower().removesuffix("-hf")
    return _PAPER.get(name)
