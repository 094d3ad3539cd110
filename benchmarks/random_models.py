"""Writes tiny random models with a tokenizer, for `equality.py` and `tests/nightly/fuzz.py`."""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

SENTENCES = [f"The quick brown fox number {n} jumps over {n * 7} lazy dogs while clouds drift by." for n in range(400)]


def write_models(configs: Mapping[Path, PreTrainedConfig]) -> None:
    """Write a random Llama or Mixtral of each config to its folder, with a tokenizer trained on
    `SENTENCES`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    torch.manual_seed(0)
    for folder, config in configs.items():
        model = LlamaForCausalLM(config) if isinstance(config, LlamaConfig) else MixtralForCausalLM(config)
        model.save_pretrained(folder)
        fast.save_pretrained(folder)
