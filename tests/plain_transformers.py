"""What a user without ddp-vllm does with a pruned checkpoint: train an adapter with peft.

Usage: plain_transformers.py FOLDER WORK_FOLDER; writes the adapter and said.json into the last. A process of its own,
so that nothing of ddp-vllm can help.
"""

import json
import sys
from pathlib import Path
from typing import Any

for name in ("ddp_vllm", "ddp_prune", "ddp_plugins", "ddp_benchmarks"):
    sys.modules[name] = None  # type: ignore[assignment]  # an editable install would make them importable

import torch  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)


def train_adapter(folder: str, adapter: str) -> dict[str, Any]:
    """Train, save, load and merge an adapter; return the losses and how far the merged logits are off."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    tokens = tokenizer("A fox met a crow with a piece of cheese.", return_tensors="pt")
    model = get_peft_model(load(folder), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(**tokens, labels=tokens["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(adapter)
    parts = {name: list(part.shape) for name, part in model.named_parameters() if "lora_B" in name}
    shapes = {name.split("layers.")[1].split(".lora_B")[0]: shape for name, shape in parts.items()}
    with torch.no_grad():
        expected = model.eval()(**tokens).logits
        merged = PeftModel.from_pretrained(load(folder), adapter).merge_and_unload().eval()(**tokens).logits
    return {"losses": losses, "shapes": shapes, "merged": (merged - expected).abs().max().item()}


if __name__ == "__main__":
    folder, work = sys.argv[1:]
    Path(work, "said.json").write_text(json.dumps(train_adapter(folder, f"{work}/adapter")))
