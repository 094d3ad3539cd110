"""Reads conversations, draws a sample by vLLM's rules, and writes the file that vLLM's sampler
reads.

A ShareGPT entry is `{"id": …, "conversations": [{"from": "human", "value": …}, {"from": "gpt",
"value": …}, …]}`. The first turn is the prompt, the length of the second is the number of tokens to
generate. We draw the sample ourselves to know the number of usable conversations before an engine
starts.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_prune.text.conversations import Conversation, RowParser
from ddp_prune.text.messages import EXAMPLE, Notes, at
from ddp_prune.text.rows import open_rows, reading_text
from ddp_prune.text.templates import ChatTemplate, words_of
from ddp_vllm.errors import TextError, reading

SHARE_GPT = ("anon8231489123/ShareGPT_Vicuna_unfiltered", "ShareGPT_V3_unfiltered_cleaned_split.json")
# tokens; vllm.benchmarks.datasets.is_valid_sequence
MIN_LENGTH, MAX_PROMPT_LENGTH, MAX_TOTAL_LENGTH = 4, 1024, 2048


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The conversations that a benchmark replays."""

    entries: tuple[dict[str, Any], ...]
    prompt_tokens: int
    output_tokens: int
    """Number of tokens to generate, ignoring end-of-text."""
    num_requested: int

    @property
    def output_characters(self) -> int:
        """Number of characters of the answers whose tokens are generated."""
        return sum(len(answer) for _, answer in map(turns_of, self.entries))

    def counted(self, count_tokens: Callable[[str], int]) -> "Sample":
        """Return the same conversations with the tokens of another tokenizer."""
        turns = [[*map(count_tokens, turns_of(entry))] for entry in self.entries]
        return replace(self, prompt_tokens=sum(one for one, _ in turns), output_tokens=sum(two for _, two in turns))

    @property
    def sha256(self) -> str:
        """Digest of the prompts and answers, equal for runs that replayed the same
        conversations."""
        return hashlib.sha256(json.dumps(self.entries, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "conversations": len(self.entries),
            "requested": self.num_requested,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "sha256": self.sha256,
        }

    def describe(self) -> str:
        """Return the numbers of conversations and tokens, and a note if there are fewer than
        requested."""
        text = f"{len(self.entries)} conversations, {self.prompt_tokens} prompt and {self.output_tokens} output tokens"
        if len(self.entries) < self.num_requested:
            text += f"; {self.num_requested} were requested, but no more are usable, and none is used twice"
        return text


def download_share_gpt() -> Path:
    """Return the file of ShareGPT that vLLM's documentation uses. Raises: TextError if the Hub is out of reach."""
    from huggingface_hub import hf_hub_download

    with reading("ShareGPT on the Hub", TextError, "pass --dataset FILE with conversations"):
        return Path(hf_hub_download(*SHARE_GPT, repo_type="dataset"))


def read_conversations(path: Path) -> list[dict[str, Any]]:
    """Read every conversation of a file as a ShareGPT entry; the formats are those that `prune`
    reads.

    An entry of ShareGPT stays as it is, since vLLM takes its first two turns whoever speaks. Of
    other conversations the first words of the user become the prompt, and the assistant's first
    words the answer.
    Raises: TextError with place and reason if the file is missing, or a row holds no conversation.
    """
    if not path.exists():
        raise TextError(f"{path} does not exist; pass a file with conversations, such as ShareGPT")
    rows, parser = open_rows(str(path)), RowParser(Notes(), ChatTemplate())
    conversations = []
    with reading_text(str(path)):
        for place, row in rows.read():
            with at(place):
                conversations.append(row if _is_share_gpt(row) else _as_share_gpt(parser.parse(row)))
    return conversations


def _is_share_gpt(row: Any) -> bool:
    turns = row.get("conversations") if isinstance(row, dict) else None
    return isinstance(turns, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("value"), str) for turn in turns[:2]
    )


def _as_share_gpt(content: str | Conversation) -> dict[str, Any]:
    """Return the first question and answer of a conversation; fewer turns if it has no such
    words."""
    if isinstance(content, str):
        if content:
            raise TextError(f"a text, not a conversation; write {EXAMPLE}")
        return {"conversations": []}
    words = {message["role"]: text for message in reversed(content.messages) if (text := words_of(message))}
    speakers = {"user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": speakers[role], "value": words[role]} for role in speakers if role in words]}


def draw_sample(
    conversations: Sequence[dict[str, Any]],
    count_tokens: Callable[[str], int],
    *others: Callable[[str], int],
    num_prompts: int,
    seed: int,
    max_model_len: int = MAX_TOTAL_LENGTH,
) -> Sample:
    """Draw the `num_prompts` conversations that `vllm bench` would draw from the same file with the
    same seed.

    count_tokens: returns the length of a text in tokens, special tokens included. others: those of
    further tokenizers, for which the conversations must be usable too.
    max_model_len: longer conversations are skipped, in tokens. If fewer conversations are usable
    the sample is smaller; none is used twice. Raises: TextError if none is usable.
    """
    candidates = [entry for entry in conversations if len(entry["conversations"]) >= 2]
    random.Random(seed).shuffle(candidates)
    limit = min(MAX_TOTAL_LENGTH, max_model_len)
    entries: list[dict[str, Any]] = []
    prompt_tokens = output_tokens = 0
    for entry in candidates:
        if len(entries) == num_prompts:
            break
        (prompt, answer), *further = ([*map(count, turns_of(entry))] for count in (count_tokens, *others))
        if all(_is_usable(one, other, limit) for one, other in ((prompt, answer), *further)):
            entries.append({"id": str(entry.get("id", "")), "conversations": entry["conversations"][:2]})
            prompt_tokens, output_tokens = prompt_tokens + prompt, output_tokens + answer
    if not entries:
        raise TextError(
            f"none of {len(conversations)} conversations has two turns of at least {MIN_LENGTH} tokens, a prompt of at "
            f"most {MAX_PROMPT_LENGTH} and {limit} tokens in total; pass another --dataset"
        )
    return Sample(
        entries=tuple(entries), prompt_tokens=prompt_tokens, output_tokens=output_tokens, num_requested=num_prompts
    )


def turns_of(entry: dict[str, Any]) -> tuple[str, str]:
    """Return the prompt and the answer of a ShareGPT entry."""
    prompt, answer = (turn["value"] for turn in entry["conversations"][:2])
    return prompt, answer


def _is_usable(prompt: int, answer: int, limit: int) -> bool:
    """Tell whether vLLM replays a prompt and an answer of these tokens."""
    return MIN_LENGTH <= prompt <= MAX_PROMPT_LENGTH and MIN_LENGTH <= answer <= limit - prompt


def write_sample(sample: Sample, path: Path) -> None:
    """Write the JSON array that vLLM's ShareGPT sampler reads; it uses every entry."""
    path.write_text(json.dumps(sample.entries, ensure_ascii=False), encoding="utf-8")
