"""Learn masks on a model in memory, and print the widths that they leave: the core alone, without files or commands.

    python examples/core.py

The model is small and random, so the widths mean nothing; put a loaded model and blocks of its text in their place.
"""

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig

from ddp_prune.core.gates import GatedModel
from ddp_prune.core.learn import learn
from ddp_prune.core.saved import Unsaved
from ddp_prune.pools import make_pools
from ddp_prune.recipe import Recipe
from ddp_prune.run import Run
from ddp_vllm.dimensions import dimensions_of, widths_of


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 320}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))
    model.requires_grad_(False).eval()
    blocks = torch.randint(320, (64, 32))  # int64 [num_blocks, seq_len]

    # 1. A gate on every KV group and every MLP channel.
    config = model.config.to_dict()
    gated = GatedModel(model, widths_of(config), dimensions_of(config), "kv-group")

    # 2. A budget: keep 60 % of the parameters behind these gates.
    recipe = Recipe(sparsity=0.4, budget="params", steps=40, batch_size=4, seq_len=32, train="masks")
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    pools = make_pools(config, shapes, gated.sizes, gated.head_unit, recipe)

    # 3. Search, round, polish. Gates that are 0 can be removed.
    learned = learn(gated, blocks, Run.alone(recipe), pools, Accelerator(), Unsaved(), lambda metrics: None)
    for layer, (heads, channels) in enumerate(zip(learned.gates["attn"], learned.gates["mlp"], strict=True)):
        print(f"layer {layer}: {int((heads > 0).sum())} of 4 KV heads, {int((channels > 0).sum())} of 256 channels")


if __name__ == "__main__":
    main()
