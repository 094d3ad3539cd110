"""Reads ShareGPT conversations, draws a sample by vLLM's rules, and writes the file that vLLM's sampler reads.

A ShareGPT entry is `{"id": …, "conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]}`. The
first turn is the prompt, the length of the second is the number of tokens to generate. We draw the sample ourselves to
know the number of usable conversations before an engine starts.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_vllm.errors import TextError
from ddp_vllm.hub.fetch import array_entries

MIN_LENGTH, MAX_PROMPT_LENGTH, MAX_TOTAL_LENGTH = 4, 1024, 2048  # tokens; vllm.benchmarks.datasets.is_valid_sequence


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The conversations that a benchmark replays."""

    entries: tuple[dict[str, Any], ...]
    prompt_tokens: int
    output_tokens: int
    """Number of tokens to generate, ignoring end-of-text."""
    num_requested: int

    @property
    def sha256(self) -> str:
        """Digest of the prompts and answers, equal for runs that replayed the same conversations."""
        return hashlib.sha256(json.dumps(self.entries, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "conversations": len(self.entries),
            "asked": self.num_requested,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "sha256": self.sha256,
        }

    def describe(self) -> str:
        """Return the numbers of conversations and tokens, and a note if there are fewer than requested."""
        text = f"{len(self.entries)} conversations, {self.prompt_tokens} prompt and {self.output_tokens} output tokens"
        if len(self.entries) < self.num_requested:
            text += f"; {self.num_requested} were requested, but no more are usable, and none is used twice"
        return text


def read_conversations(path: Path) -> list[dict[str, Any]]:
    """Read every conversation of a ShareGPT file: a JSON array, or one JSON object per line.

    Raises: TextError with line and reason if the file is missing or not JSON, or an entry is not a conversation.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise TextError(f"{path} does not exist; pass a ShareGPT file, or omit --dataset to fetch one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path} cannot be read as UTF-8 text ({error}); pass a ShareGPT file in JSON") from error
    array = text.lstrip().startswith("[")
    conversations = []
    for line, value in array_entries(path, text) if array else _line_entries(path, text):
        if reason := _malformed(value):
            raise TextError(f"{path}, line {line}: {reason}; a ShareGPT entry is, for example, {_EXAMPLE}")
        conversations.append(value)
    if not conversations:
        raise TextError(f"{path} has no conversations; pass a ShareGPT file, or omit --dataset to fetch one")
    return conversations


_EXAMPLE = '{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}'


def _line_entries(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would split at U+2028, which occurs in answers
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise TextError(
                    f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}); fix or delete the line"
                ) from None
            except (RecursionError, ValueError):
                raise TextError(f"{path}, line {number}: nesting or number too long; delete the line") from None


def _malformed(entry: Any) -> str | None:
    """Return why an entry is malformed, or None; an entry with too few turns is unusable, but not malformed."""
    if not isinstance(entry, dict):
        return f"{type(entry).__name__} instead of an object"
    turns = entry.get("conversations")
    if not isinstance(turns, list):
        return "no list under the key conversations"
    for number, turn in enumerate(turns[:2], 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            return f"turn {number} has no text under the key value"
    try:
        json.dumps([entry.get("id"), turns[:2]], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"a lone surrogate (\\u{ord(error.object[error.start]):04x}), which is no text: fix or delete it"
    return None


def draw_sample(
    conversations: Sequence[dict[str, Any]],
    count_tokens: Callable[[str], int],
    *,
    num_prompts: int,
    seed: int,
    max_model_len: int = MAX_TOTAL_LENGTH,
) -> Sample:
    """Draw the `num_prompts` conversations that `vllm bench` would draw from the same file with the same seed.

    count_tokens: returns the length of a text in tokens, special tokens included.
    max_model_len: longer conversations are skipped, in tokens.
    If fewer conversations are usable the sample is smaller; none is used twice. Raises: TextError if none is usable.
    """
    candidates = [entry for entry in conversations if len(entry["conversations"]) >= 2]
    random.Random(seed).shuffle(candidates)
    limit = min(MAX_TOTAL_LENGTH, max_model_len)
    entries: list[dict[str, Any]] = []
    prompt_tokens = output_tokens = 0
    for entry in candidates:
        if len(entries) == num_prompts:
            break
        prompt, answer = (count_tokens(turn["value"]) for turn in entry["conversations"][:2])
        if MIN_LENGTH <= prompt <= MAX_PROMPT_LENGTH and MIN_LENGTH <= answer <= limit - prompt:
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


def write_sample(sample: Sample, path: Path) -> None:
    """Write the JSON array that vLLM's ShareGPT sampler reads; it uses every entry."""
    path.write_text(json.dumps(sample.entries, ensure_ascii=False), encoding="utf-8")
