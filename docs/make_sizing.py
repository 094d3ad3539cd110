"""Writes sizing.md: what models take on which GPUs. Run it after a change of what training keeps in
memory.

    python docs/make_sizing.py          # seconds; needs no weights and no GPU

The sizes of the models are those of their config.json on the Hub.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from ddp_prune.fit import MODES, UTILIZATION, Devices, Fit
from ddp_prune.models.source import Source
from ddp_prune.plan import estimate
from ddp_prune.recipe import Recipe
from ddp_vllm.dimensions import dimensions_of

LLAMA: dict[str, Any] = {
    "model_type": "llama", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN: dict[str, Any] = {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False, "num_attention_heads": 32}
MODELS: dict[str, dict[str, Any]] = {
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
ON = ("1xrtx4090-24gb", "1xh100-80gb", "2xh100-80gb", "8xh100-80gb")
TOKENS = 1000 * 16 * 2048
HEAD = f"""# Memory and hours

<!-- Written by docs/make_sizing.py. -->

Peak memory per GPU in GB, and hours for the default run of {TOKENS / 1e6:.0f} million tokens. `--train auto` takes the
lowest row whose weights, teacher and optimizer fit into 70 % of the free memory; pass a mode to use more.
`ddp-vllm prune MODEL --sparsity 0.2 --dry-run --on 2xh100-80gb` prints the same for any model.

| mode | bytes per prunable 16-bit weight, teacher included | options |
|---|---|---|
| masks | 2 | `--train masks` |
| lora | 2, and 0.3 for rank 16 | `--train lora` |
| 8-bit | 8 | `--train weights --optimizer adamw-8bit` |
| adamw | 20 | `--train weights --optimizer adamw` |

A pass reads at least 8,192 tokens; with ¹, fewer. Layers are checkpointed, except with ². Several GPUs share the
weights. "–" does not fit; rows that fit nowhere are left out. Memory is a formula, which gives 246 MB for a step that
added 247 MB on a CPU. Hours are counted FLOPs at {UTILIZATION:.0%} of the GPU's peak.

"""
NAMES = dict(zip(MODES, ("adamw", "8-bit", "lora", "masks"), strict=True))


def source_of(config: dict[str, Any], folder: Path) -> Source:
    """Return a model as if it were in a folder, with the shapes of its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), trust_remote_code=False)
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    return Source(folder=folder, config=config, sizes=dimensions_of(config), shapes=shapes)


def cell(found: Fit, seconds: float) -> str:
    """Return peak and hours of a run, or a dash."""
    if found.peak > found.free:
        return "–"
    fewer = "¹" * (found.num_sequences < 4) + "²" * (not found.checkpointed)
    return f"{found.peak / 1e9:.0f}{fewer}, {seconds / 3600:.2g}"


def main() -> None:
    lines = [f"| GB, hours | {' | '.join(ON)} |", "|---" * (len(ON) + 1) + "|"]
    for name, sizes in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            source = source_of(sizes | {"max_position_embeddings": 32768, "dtype": "bfloat16"}, Path(folder))
            recipe = Recipe(model=folder, sparsity=0.2)
            rows = [
                {found.mode: (found, seconds) for found, _, seconds in estimate([recipe], source, cards)}
                for cards in map(Devices.of_cards, ON)
            ]
        for mode in reversed(MODES):
            cells = [cell(*row[mode]) for row in rows]
            if set(cells) != {"–"}:
                lines.append(f"| {name}, {NAMES[mode]} | {' | '.join(cells)} |")
    Path(__file__).with_name("sizing.md").write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
