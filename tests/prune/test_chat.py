"""Conversations that a chat template refuses: made to alternate if that helps, plain text if not, never the run's end.

The templates are short forms of published ones, with the conditions that raise.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_prune.tokens import load_tokenizer, read_excerpts

MISTRAL = (  # Mixtral-8x7B-Instruct-v0.1, and Llama-2-chat but for its system turn
    "{{ '<s>' }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ m['content'] + '</s>' }}"
    "{% endif %}{% endfor %}"
)
GEMMA = (  # Gemma-2-it
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
)
LENIENT = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
CASES: dict[str, tuple[str, list[tuple[str, str]], str]] = {  # template, turns, text
    "as it is": (MISTRAL, [("human", "a"), ("gpt", "b")], "<s>[INST] a [/INST]b</s>"),
    "assistant first": (MISTRAL, [("gpt", "x"), ("human", "a"), ("gpt", "b")], "<s>[INST] a [/INST]b</s>"),
    "twice the assistant first": (GEMMA, [("gpt", "x"), ("gpt", "y"), ("human", "a")], "<user>a\n"),
    "neighbours": (
        GEMMA,
        [("human", "a"), ("human", "b"), ("gpt", "c"), ("gpt", "d")],
        "<user>a\n\nb\n<assistant>c\n\nd\n",
    ),
    "neighbours after an empty turn": (GEMMA, [("human", "a"), ("gpt", ""), ("human", "b")], "<user>a\n\nb\n"),
    "system refused": (GEMMA, [("system", "s"), ("human", "a"), ("gpt", "b")], "s\n\na\n\nb"),
    "system is no user": (MISTRAL, [("system", "s"), ("human", "a"), ("gpt", "b")], "s\n\na\n\nb"),
    "only the assistant": (MISTRAL, [("gpt", "x"), ("gpt", "y")], "x\n\ny"),
    "lenient, assistant first": (LENIENT, [("gpt", "x"), ("human", "a")], "<assistant>x<user>a"),
    "lenient, neighbours": (LENIENT, [("human", "a"), ("human", "b")], "<user>a<user>b"),
    "lenient, system": (LENIENT, [("system", "s"), ("human", "a")], "<system>s<user>a"),
    "other assistants": (
        LENIENT,
        [("user", "a"), ("chatgpt", "b"), ("human", "c"), ("bing", "d"), ("someone", "e"), ("bard", "f")],
        "<user>a<assistant>b<user>c<assistant>d<user>e<assistant>f",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_VLLM_CACHE", str(tmp_path / "cache"))


def _text(template: str, turns: list[tuple[str, str]], tiny_model: Path, folder: Path) -> str:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = template
    row: dict[str, Any] = {"conversations": [{"from": speaker, "value": value} for speaker, value in turns]}
    (folder / "chat.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    ((_, text),) = read_excerpts(str(folder / "chat.jsonl"), tokenizer, 0, size=1000, few=1)
    return text


@pytest.mark.parametrize("case", CASES)
def test_a_conversation_under_a_template(case: str, tiny_model: Path, tmp_path: Path) -> None:
    template, turns, expected = CASES[case]
    assert _text(template, turns, tiny_model, tmp_path) == expected


def test_a_turn_of_several_parts_says_what_is_text(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = LENIENT
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "url": "cat.png"}, {"type": "text", "text": "b"}]
    picture = {"role": "user", "content": [{"type": "image_url", "url": "dog.png"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "c"}]}
    row = {"messages": [{"role": "user", "content": parts}, picture, answer]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    ((_, text),) = read_excerpts(str(tmp_path / "chat.jsonl"), tokenizer, 0, size=1000, few=1)
    assert text == "<user>a\n\nb<assistant>c"
