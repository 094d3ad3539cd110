"""How long does a training step take, and in how much memory? The paper's table 8, on one GPU with
random weights.

    python benchmarks/borrowed_gpu/step_cost.py OUT.json

Paper (LLaMA-2-7B, 4 GPUs, 16 x 2,048 tokens): masks 2.1 s and 18 GB, with distillation 2.5 and 19,
LoRA 2.4 and 18, full fine-tuning 2.9 and 83. A step here is one micro-batch of 4 x 2,048 tokens; 4
of them are the paper's batch on one GPU.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator

from ddp_prune.core.batches import Batches
from ddp_prune.core.decoder import fuse_elementwise
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.learn import trainer_of
from ddp_prune.core.loss import OutputHead, distill, final_hidden
from ddp_prune.pools import head_unit_of, make_checked_pools
from ddp_prune.recipe import Recipe
from ddp_prune.run import Run
from ddp_vllm.dimensions import dimensions_of, widths_of
from lease import DEVICE, DRY, Results, synchronize
from machine import build, config_of

CASES: list[tuple[str, str, dict[str, Any]]] = [  # the paper's rows first
    # before rotary embeddings are compiled for good
    ("masks, distilled, not fused", "llama-2-7b", {"fused": False}),
    ("masks, distilled", "llama-2-7b", {}),
    ("masks", "llama-2-7b", {"distillation": 0.0}),
    ("LoRA r=8, our head", "llama-2-7b", {"lora": True}),
    ("masks, distilled, half closed", "llama-2-7b", {"open_share": 0.5}),
    ("masks, distilled", "qwen3-30b-a3b", {}),
    ("masks, distilled, 2 sequences, nothing checkpointed", "llama-2-7b", {"checkpointing": "off", "sequences": 2}),
    ("masks, distilled", "qwen3-8b", {}),
]
SEQUENCES, SEQ_LEN, ROUNDS = (2, 64, 1) if DRY else (4, 2048, 3)


def lora_step(model: Any, tokens: torch.Tensor) -> Callable[[], Any]:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted, head = get_peft_model(model, settings), OutputHead.of(model)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)

    def step() -> None:
        hidden = final_hidden(adapted.get_base_model(), tokens)
        distill(hidden, None, head, tokens[:, 1:].reshape(-1), 0.0)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def mask_step(
    model: Any, full: dict[str, Any], blocks: torch.Tensor, options: dict[str, Any]
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return a step of the product's own trainer, and what it chose."""
    sequences = len(blocks) // 16
    recipe = Recipe(
        model="random", sparsity=0.5, steps=100_000, polish=0.0, distillation=options.get("distillation", 2.0),
        batch_size=sequences, seq_len=SEQ_LEN, micro_batch_size=sequences, train="masks",
        activation_checkpointing=options.get("checkpointing", "on"),
    )  # fmt: skip
    accelerator, sizes = Accelerator(cpu=DRY), dimensions_of(full)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    source: Any = SimpleNamespace(config=full, text_config=full, sizes=sizes, widths=widths_of(full), shapes=shapes)
    unit, pools = head_unit_of(recipe, source), make_checked_pools(recipe, source, shapes)
    if not DRY and options.get("fused", True):
        with suppress(Exception):  # as `load_trained` does
            fuse_elementwise(model)
    gated, schedule = GatedModel(model, source.widths, sizes, unit), Run.alone(recipe).schedule
    batches = Batches(blocks, schedule, accelerator)
    trainer = trainer_of(schedule)(gated, batches, schedule, pools)
    if share := options.get("open_share"):
        support = trainer.gates.support
        trainer.gates.support = {kind: torch.rand(mask.shape, device=DEVICE) < share for kind, mask in support.items()}
    numbers = iter(range(1000, 100_000))
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    narrow, micro_batch = trainer.narrow is not None, batches.micro_batch_size
    facts = {"checkpointed": checkpointed, "micro_batch": micro_batch, "narrow": narrow}
    return lambda: trainer.step(next(numbers)), facts


def main() -> None:
    results = Results(sys.argv[1])
    for name, which, options in CASES:
        with results.row(case=name, model=which) as row:
            sequences = options.get("sequences", SEQUENCES)
            blocks = torch.randint(3, config_of(which)["vocab_size"], (16 * sequences, SEQ_LEN))
            model, full = build(config_of(which), DEVICE, torch.bfloat16)
            weights = sum(p.nbytes for p in model.parameters())
            facts = dict[str, Any]()
            if options.get("lora"):
                step = lora_step(model, blocks[:sequences].to(DEVICE))
            else:
                step, facts = mask_step(model, full, blocks, options)
            if not DRY:
                torch.cuda.reset_peak_memory_stats()
            times = []
            for _ in range(1 + ROUNDS):
                synchronize()
                began = time.perf_counter()
                step()
                synchronize()
                times.append(time.perf_counter() - began)
            seconds = statistics.median(times[1:])
            row |= facts | {
                "seconds": seconds, "first_seconds": times[0], "tokens_per_second": sequences * SEQ_LEN / seconds,
                "weights_gb": weights / 1e9,
            }  # fmt: skip
            if not DRY:
                peak = torch.cuda.max_memory_allocated()
                row |= {"peak_gb": peak / 1e9, "above_weights_gb": (peak - weights) / 1e9}
        model = step = None
        gc.collect()
        if not DRY:
            torch.cuda.empty_cache()
    results.finish()


if __name__ == "__main__":
    main()
