"""Learn masks on a model in memory, and print the widths that they leave: the core alone, without files or commands.

The model is small and random, so the widths mean nothing; put a loaded model and blocks of its text in their place.
"""

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig

from ddp_prune.core.budget import Pool
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.learn import learn
from ddp_prune.core.schedule import Schedule, Steps, Unsaved
from ddp_vllm.dimensions import dimensions_of, widths_of


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 320}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()
    blocks = torch.randint(320, (64, 32))  # int64 [num_blocks, seq_len]
    # 1. A gate on every KV group and every MLP channel.
    gated = GatedModel(model, widths_of(config.to_dict()), dimensions_of(config.to_dict()), "kv-group")
    # 2. A budget: 60 % of the parameters behind these gates.
    per_unit = {"attn": 2 * (2 + 1) * 8 * 64, "mlp": 3 * 64}  # of two query heads and a KV head; of a channel
    costs = {kind: torch.full((4,), float(cost)) for kind, cost in per_unit.items()}
    kept = 0.6 * 4 * (4 * per_unit["attn"] + 256 * per_unit["mlp"])
    pool = Pool(name="params", currency="parameters", shapes=gated.shapes, costs=costs, kept=kept)
    # 3. 26 steps of search; rounding; 14 steps of polish. Units whose gate is 0 can be removed.
    schedule = Schedule(steps=Steps(0, 26, 40), batch_size=4)
    learned = learn(gated, blocks, schedule, [pool], Accelerator(), Unsaved(), lambda metrics: None)
    for layer, (heads, channels) in enumerate(zip(learned.gates["attn"], learned.gates["mlp"], strict=True)):
        print(f"layer {layer}: {int((heads > 0).sum())} of 4 KV heads, {int((channels > 0).sum())} of 256 channels")


if __name__ == "__main__":
    main()
