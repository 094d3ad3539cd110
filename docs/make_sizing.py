"""Writes sizing.md: what models take on which GPUs. Run it after a change of what training keeps in memory.

    python docs/make_sizing.py          # ten minutes of one core; needs no weights and no GPU

The sizes of the models are those of their config.json on the Hub.
"""

from pathlib import Path
from typing import Any

from ddp_prune.mode import MODES, Mode
from ddp_prune.sizing import CARDS, UTILIZATION, active_parameters, step_bytes, training_hours

LLAMA: dict[str, Any] = {
    "model_type": "llama", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN: dict[str, Any] = {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False, "num_attention_heads": 32}
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": LLAMA | {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "Qwen3-8B": QWEN | {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": QWEN | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "Llama-3.1-70B": LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}  # fmt: skip
ON = ("rtx4090-24gb", "h100-80gb", "h200-141gb")
COUNTS = (1, 2, 8)
TOKENS, SEQ_LEN = 1000 * 16 * 2048, 2048
HEAD = f"""# What it takes

<!-- Written by docs/make_sizing.py. -->

Peak memory per GPU and hours for the default run: 1,000 steps of 16 × 2,048 tokens, {TOKENS / 1e6:.0f} M in all.
`--train auto` takes the last row whose weights, teacher and optimizer fit into 70 % of the free memory.
Pass a mode by name to use more of it.

| mode | bytes per prunable 16-bit weight | options |
|---|---|---|
| masks only | 2 | `--train masks` |
| masks and low-rank additions | 2, and about 0.3 for additions of rank 16 | `--train lora` |
| masks and weights with adamw-8bit | 8, the teacher included | `--train weights --optimizer adamw-8bit` |
| masks and weights with adamw | 20, the teacher included | `--train weights --optimizer adamw` |

`ddp-vllm prune MODEL --sparsity 0.2 --dry-run --on 2xh100-80gb -o out` prints the same for any model.

Memory was found by running the training step at its real size on PyTorch's fake tensors, with checkpointed layers and
8,192 tokens per pass; with ¹, 2,048 tokens, because more do not fit. "–" means that it does not fit. Usable memory:
25.2 GB (RTX 4090), 84.9 GB (H100) and 150.1 GB (H200), of 10⁹ bytes. Several GPUs share the weights (`--shard`).
Hours are an estimate: counted FLOPs at {UTILIZATION:.0%} of the GPU's bfloat16 peak. No run on a GPU has
checked either yet. On a CPU the simulation gave 0.90 (masks only), 0.87 (adamw-8bit) and 0.98 (adamw) of the measured
peak of SmolLM2-135M, 0.4 to 2.3 GB, and 0.99 for Qwen2.5-Coder-0.5B with adamw, 7.6 GB
(`benchmarks/lab/sizing_check.py`). A mixture of experts is estimated by the formulas of
[memory by formula](large-models.md), because its routing depends on data.
"""


def cell(config: dict[str, Any], mode: Mode, card: str, count: int, peaks: dict[int, int]) -> str:
    """Return peak and hours of a run, or a dash."""
    for num_sequences, peak in peaks.items():
        if peak <= CARDS[card].memory:
            hours = training_hours(config, mode, TOKENS, CARDS[card], count, distillation=True)
            return f"{peak / 1e9:.0f} GB{'¹' if num_sequences == 1 else ''}, {hours:.2g} h"
    return "–"


def main() -> None:
    lines = [HEAD]
    for name, config in MODELS.items():
        config |= {"max_position_embeddings": 32768}
        lines.append(f"## {name}\n")
        lines.append(f"{active_parameters(config) / 1e9:.2f} B parameters per token.\n")
        columns = [(card, count) for card in ON for count in COUNTS]
        lines.append("| mode | " + " | ".join(f"{count} × {card}" for card, count in columns) + " |")
        lines.append("|---" * (len(columns) + 1) + "|")
        for mode in reversed(MODES):
            peaks = {
                count: {
                    number: step_bytes(config, mode, number, SEQ_LEN, count, distillation=True) for number in (4, 1)
                }
                for count in COUNTS
            }
            cells = [cell(config, mode, card, count, peaks[count]) for card, count in columns]
            lines.append(f"| {mode} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
        lines.append("")
    Path(__file__).with_name("sizing.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
