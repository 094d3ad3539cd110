"""A byte-level tokenizer, trained on the spot."""

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def train(
    texts: Iterable[str],
    vocab_size: int = 320,
    special: Sequence[str] = (),
    spaced: bool = False,
    cuts: pre_tokenizers.PreTokenizer | None = None,
    ignore_merges: bool = False,
    **settings: Any,
) -> PreTrainedTokenizerFast:
    """spaced: a blank is put before every text. cuts: how words are cut. settings: such as `eos_token`."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = cuts or pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
