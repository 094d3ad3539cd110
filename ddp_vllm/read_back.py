"""The script of `proof`: reads a model's folder with transformers alone, as its users do.

    python -P read_back.py FOLDER REQUEST RESULT

FOLDER: of a model. REQUEST: JSON with the texts to tokenize, the tokens to read, the positions
whose logits are returned, and whether FOLDER has code of ours, which then runs. RESULT: where the
ids, the texts that they are decoded to, the logits, float32 [positions, vocab_size], or the error
that loading the model ended with, are written. It imports nothing of ddp-vllm, and runs in a
process of its own, so that nothing that is registered in the caller's process can help it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer


def read_texts(tokenizer: Any, texts: list[str]) -> dict[str, Any]:
    """Return what a tokenizer makes of texts."""
    ids = [tokenizer(text, verbose=False)["input_ids"] for text in texts]
    return {"tokens": ids, "texts": list(map(tokenizer.decode, ids)), "templates": [str(tokenizer.chat_template)]}


@torch.no_grad()
def logits_of(model: Any, tokens: list[int], positions: list[int]) -> torch.Tensor:
    """Return a model's logits at some positions of a text, float32 [positions, vocab_size]."""
    logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0, positions]
    return logits.float().cpu().contiguous()


def load(folder: str, **options: Any) -> Any:
    """Load a model as its users do, but refuse one that lacks weights."""
    config = AutoConfig.from_pretrained(folder, **options)
    kinds = AutoModelForCausalLM, AutoModelForImageTextToText
    kind = next((kind for kind in kinds if type(config) in kind._model_mapping), kinds[0])
    model, loaded = kind.from_pretrained(folder, output_loading_info=True, **options)
    if missing := {*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])}:
        raise ValueError(f"{min(missing)} would be initialized at random ({len(missing)} weights in all)")
    return model.eval()


if __name__ == "__main__":
    folder, request, result = sys.argv[1:]
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    options, read, tensors = {"trust_remote_code": asked["has_our_code"]}, dict[str, Any](), {}
    try:
        if asked["texts"]:
            read["texts"] = read_texts(AutoTokenizer.from_pretrained(folder, **options), asked["texts"])
        if asked["tokens"]:
            model = load(folder, **options)
            read["dtype"] = str(model.dtype).removeprefix("torch.")
            tensors["logits"] = logits_of(model, asked["tokens"], asked["positions"])
    except Exception as error:  # of any library
        read["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    save_file(tensors, result, {"read": json.dumps(read)})
