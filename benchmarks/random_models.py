"""Writes tiny random models with a tokenizer, for `equality.py` and the tests."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

SENTENCES = [f"The quick brown fox number {n} jumps over {n * 7} lazy dogs while clouds drift by." for n in range(400)]


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 320,
    special: Sequence[str] = (),
    spaced: bool = False,
    cuts: pre_tokenizers.PreTokenizer | None = None,
    ignore_merges: bool = False,
    **settings: Any,
) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer.

    spaced: a blank is put before every text. cuts: how words are cut, if not as GPT-2's are.
    ignore_merges: known words are one token. settings: of the tokenizer, such as `eos_token`.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = cuts or pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def write_models(configs: Mapping[Path, PreTrainedConfig], tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """Write a random Llama or Mixtral of each config to its folder, with a tokenizer, by default
    one trained on `SENTENCES`."""
    tokenizer = tokenizer or train_tokenizer(SENTENCES, special=["<eos>"], eos_token="<eos>")
    torch.manual_seed(0)
    for folder, config in configs.items():
        model = LlamaForCausalLM(config) if isinstance(config, LlamaConfig) else MixtralForCausalLM(config)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
