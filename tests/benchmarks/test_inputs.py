"""What is known of a model without loading it, and which conversations are usable; others are refused by line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_benchmarks import side_by_side, verbs
from ddp_benchmarks.conversations import download_share_gpt, draw_sample, read_conversations, turns_of
from ddp_benchmarks.models import max_model_len
from ddp_benchmarks.sharegpt import Requests
from ddp_vllm.costs import experts_chosen
from ddp_vllm.dimensions import attended
from ddp_vllm.errors import TextError
from ddp_vllm.model_facts import dense_kv_bytes, describe_model, local_folder, unrelated

INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "max_position_embeddings": 64,
}


def test_models_that_are_not_related_are_named(tiny: Path, halved: Path, tmp_path: Path) -> None:
    """What is compared should be a model and its pruned versions; a model and itself show noise."""
    other, wider = tmp_path / "other", tmp_path / "wider"
    for folder, changes in ((other, {"model_type": "qwen3"}), (wider, {"hidden_size": 4096})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(json.loads((tiny / "config.json").read_text()) | changes))
    related = [(tiny, halved), (tiny, tiny), (halved, halved), (tmp_path / "missing", halved)]
    assert not any(unrelated(str(dense), str(pruned)) for dense, pruned in related)
    assert unrelated(str(halved), str(tiny)).endswith("are they exchanged?")
    assert "its model_type is llama, not qwen3" in unrelated(str(other), str(halved))
    assert "its hidden_size is 64, not 4096" in unrelated(str(wider), str(halved))


@pytest.mark.parametrize(("arguments", "value_bytes"), [
    ([], 2), (["--dtype", "float32"], 4), (["--dtype=float32"], 4), (["--dtype", "float"], 4), (["--dtype", "half"], 2),
    (["--dtype", "bfloat16", "--mamba-ssm-cache-dtype", "float32"], 2), (["--mamba-ssm-cache-dtype=float32"], 2),
    (["--download-dir", "/models/float32"], 2), (["--dtype", "float32", "--dtype", "bfloat16"], 2),
])  # fmt: skip
def test_the_cache_of_an_engine_has_the_size_of_its_dtype(
    arguments: list[str], value_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = list[int]()
    monkeypatch.setattr(side_by_side, "cache_gib", lambda *words: sizes.append(words[-1]) or 1)
    monkeypatch.setattr(side_by_side, "number_format", lambda _: [])
    monkeypatch.setattr(side_by_side, "max_model_len", lambda _: None)
    side_by_side.StepEngine("owner/name", arguments, largest=(1, 16), log=tmp_path / "log")
    assert sizes == [value_bytes]


def test_a_name_on_the_hub_is_compared_as_a_folder_is(
    halved: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the masks file predicts, and the size of its cache; also before it is downloaded."""
    asked = list[str]()

    def known(name: str) -> Path | None:
        asked.append(name)
        return {"owner/halved": halved, "owner/tiny": tiny}.get(name)

    def compare(
        settings: side_by_side.StepSettings, *, save: Callable[[dict[str, Any]], None], **_: Any
    ) -> dict[str, Any]:
        assert side_by_side.cache_gib("owner/tiny", 64, 1 << 20, 4) > 1
        assert side_by_side.cache_gib("owner/far", 64, 1 << 20, 4) == 1
        results: dict[str, Any] = {"verdicts": [{} for _ in settings.pruned]}
        save(results)
        return results

    for module in (verbs, side_by_side):
        monkeypatch.setattr(module, "known_folder", known)
    monkeypatch.setattr(verbs, "compare_steps", compare)
    results = verbs.bench_steps("owner/tiny", ["owner/halved", "owner/far"])
    assert results == {"verdicts": [{}, {}]} and {"owner/halved", "owner/far"} <= {*asked}


@pytest.mark.parametrize(("files", "whole"), [
    (["config.json", "model.safetensors"], True),
    (["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"], False),
    (["config.json", "model.safetensors.index.json", *INDEX["weight_map"].values()], True),
])  # fmt: skip
def test_a_part_of_a_snapshot_is_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], whole: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--base" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    for name in files:
        content = json.dumps(INDEX if "index" in name else CONFIG) if name.endswith(".json") else ""
        (snapshot / name).write_bytes(content.encode() or b"\x02" + bytes(7) + b"{}")  # an empty safetensors file
    assert local_folder("org/base") == (snapshot if whole else None)
    assert describe_model("org/base").kv_bytes_per_token == (2 * 2 * 16 * 3 if whole else None)
    assert max_model_len("org/base") == (64 if "config.json" in files else None)  # for that the config will do


@pytest.mark.parametrize(
    ("kinds", "known"), [(("full", "sliding", "full"), True), (("linear", "linear", "full"), False)]
)
def test_the_cache_of_layers_without_attention_is_unknown(kinds: tuple[str, ...], known: bool, tmp_path: Path) -> None:
    """Their state does not grow with the context. An engine's memory is planned as if it did, which is enough."""
    config = CONFIG | {"layer_types": [f"{kind}_attention" for kind in kinds]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe_model(str(tmp_path)).kv_bytes_per_token == (2 * 2 * 16 * 3 if known else None)
    assert dense_kv_bytes(tmp_path, value_bytes=2) == 2 * 2 * 16 * 3


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


ATTENTION = {
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 16,
    "head_dim": 8,
}
BY_CLASS: dict[str, tuple[dict[str, Any], int | None]] = {  # fields that config.json has -> numbers per token
    "three of four layers have linear attention": ({"model_type": "qwen3_next", "full_attention_interval": 4}, None),
    "chunks of the context": ({"model_type": "llama4_text"}, 4 * 8),
    "an index of one compressed vector per layer": (
        {"model_type": "deepseek_v32", "kv_lora_rank": 12, "qk_rope_head_dim": 4}, 4 * 16 // 2,
    ),
    "convolutions": ({"model_type": "lfm2", "full_attn_idxs": [1]}, None),
    "layers that the class names otherwise, and an infinite number": (
        {"model_type": "bamba", "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8,
         "time_step_limit": [0.0, {"__float__": "Infinity"}]}, None,
    ),
    "recurrent layers": ({"model_type": "recurrent_gemma"}, None),
    "a head for all queries": ({"model_type": "falcon", "multi_query": True}, 4 * 8),
    "heads by the name of Falcon": ({"model_type": "falcon", "num_kv_heads": 2, "new_decoder_architecture": True}, 64),
    "sizes by the names of GPT-J": ({"model_type": "gptj", "n_layer": 3, "n_head": 2, "n_embd": 16}, 3 * 16),
    "wider heads in layers of full attention": (
        {"model_type": "gemma4_text", "global_head_dim": 32, "num_kv_shared_layers": 0,
         "layer_types": [*["sliding_attention"] * 3, "full_attention"]}, 3 * 8 + 32,
    ),
    "layers that share a cache": (
        {"model_type": "gemma4_text", "global_head_dim": 32, "num_kv_shared_layers": 2,
         "layer_types": ["sliding_attention", "full_attention"] * 2}, 8 + 32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_CLASS)
def test_the_cache_is_that_of_the_layers_that_the_class_builds(case: str, tmp_path: Path) -> None:
    fields, numbers = BY_CLASS[case]
    standard = {} if "n_embd" in fields else ATTENTION
    if fields["model_type"] == "falcon":
        standard = {name: ATTENTION[name] for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")}
    (tmp_path / "config.json").write_text(json.dumps(standard | fields))
    assert describe_model(str(tmp_path)).kv_bytes_per_token == (2 * 2 * numbers if numbers else None)


def test_which_layers_attend() -> None:
    gemma = {"model_type": "recurrent_gemma", "num_hidden_layers": 6, "attention_window_size": 64}
    assert attended(gemma, 100) == [0, 0, 64] * 2
    assert attended({"model_type": "falcon_h1", "num_hidden_layers": 2}, 100) == [100, 100]
    assert attended({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}, 100) == [0, 100]


@pytest.mark.parametrize(
    "keys",
    [
        *(("num_experts", "num_experts_per_tok"), ("num_experts", "num_experts_per_token")),  # the last: Kimi Linear
        *(("moe_num_experts", "moe_k"), ("n_routed_experts", "moe_topk")),
    ],
)
def test_experts_are_counted_by_every_name_that_a_class_has_for_them(keys: tuple[str, str]) -> None:
    assert experts_chosen(dict(zip(keys, (8, 2), strict=True)), None) == 0.25
    assert experts_chosen({keys[0]: [8, 8], keys[1]: 2}, None) == 0.25  # ERNIE 4.5 VL has as many for images
