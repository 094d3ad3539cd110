"""ShareGPT in: what is malformed is refused with its line, what is unusable is passed over and counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_benchmarks.conversations import download_share_gpt, draw_sample, read_conversations, turns_of
from ddp_benchmarks.sharegpt import Requests
from ddp_vllm.errors import TextError


def talk(number: int, prompt: int = 5, answer: int = 6, turns: int = 2) -> dict[str, Any]:
    """A conversation whose turns have as many words as asked."""
    texts = [" ".join([f"w{number}"] * length) for length in (prompt, answer, 3)][:turns]
    return {"id": str(number), "conversations": [{"from": "human", "value": text} for text in texts]}


def count_words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("form", ["array", "lines"])
def test_array_and_lines_read_alike(tmp_path: Path, form: str) -> None:
    talks = [talk(1), talk(2)]
    talks[0]["conversations"][1]["value"] = "two\u2028lines, which splitlines() would cut"
    file = tmp_path / "sharegpt.json"
    lines = "\n".join(json.dumps(entry, ensure_ascii=False) for entry in talks)
    file.write_text(json.dumps(talks, indent=2) if form == "array" else f"\n{lines}\n\n")
    assert read_conversations(file) == talks


def test_other_formats_are_brought_into_share_gpts(tmp_path: Path) -> None:
    roles = ("system", "assistant", "user", "user", "assistant")
    messages = [{"role": role, "content": f"{number}"} for number, role in enumerate(roles)]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + '\n{"text": ""}\n')
    turns = [{"from": "human", "value": "2"}, {"from": "gpt", "value": "1"}]
    assert read_conversations(tmp_path / "chats.jsonl") == [{"conversations": turns}, {"conversations": []}]


@pytest.mark.parametrize(("content", "reason"), [
    (b'[\n{"conversations": []},\n{"conversations"', "line 3.*cut off"),
    (b'{"conversations": [{"from": "human", "value": 1}]}', "line 1: conversations: turn 1: the content is a number"),
    (b"", "none.json"), (b"[]", "none.json"), (b"\xff\xfe\x00\x01", "none.json"), (None, "does not exist"),
])  # fmt: skip
def test_unreadable_files_are_refused_with_line_and_reason(content: bytes | None, reason: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "none.json").write_bytes(content)
    with pytest.raises(TextError, match=reason):
        read_conversations(tmp_path / "none.json")


def test_sample_keeps_vllms_limits() -> None:
    talks = [
        talk(1, prompt=3),  # vLLM drops prompts and answers under 4 tokens,
        talk(2, answer=3),
        talk(3, prompt=1025),  # prompts over 1,024,
        talk(4, prompt=1024, answer=1025),  # and more than 2,048 in all
        talk(5, prompt=1024, answer=1024),
        talk(6, turns=1),  # nothing to answer
        talk(7, prompt=4, answer=4),
    ]
    sample = draw_sample(talks, count_words, num_prompts=10, seed=0)
    assert sorted(entry["id"] for entry in sample.entries) == ["5", "7"]
    assert (sample.prompt_tokens, sample.output_tokens) == (1028, 1028)
    assert "10 were requested, but no more are usable" in sample.describe()
    shorter = draw_sample(talks, count_words, num_prompts=10, seed=0, max_model_len=100)
    assert [entry["id"] for entry in shorter.entries] == ["7"]
    with pytest.raises(TextError, match="none of 1 conversations"):
        draw_sample([talk(1, prompt=1)], count_words, num_prompts=1, seed=0)


def test_a_sample_is_usable_for_each_tokenizer_and_counted_by_it() -> None:
    talks, count_characters = [talk(number, prompt=4 + number) for number in range(300)], len
    sample = draw_sample(talks, count_words, count_characters, num_prompts=300, seed=0)
    prompts = [turns_of(entry)[0] for entry in sample.entries]
    assert 100 < len(prompts) < 300 and max(map(len, prompts)) <= 1024
    assert sample.counted(count_characters).prompt_tokens == sum(map(len, prompts)) > sample.prompt_tokens
    requests = Requests("model", sample.counted(count_characters), True)
    speeds = requests.speeds(2.0, 10.0)
    assert speeds["output_characters_per_second"] == 2 * sample.output_characters / len(prompts)
    assert requests._replace(is_by_characters=False).speeds(2.0, 10.0).keys() == speeds.keys() - {
        "output_characters_per_second"
    }


def test_without_a_file_and_a_hub_the_option_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TextError, match=r"ShareGPT on the Hub cannot be read .*pass --dataset FILE"):
        download_share_gpt()
