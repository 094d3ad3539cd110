"""Models that other tools pruned: converted, they compute what the tool's own forward pass computes, in any runtime."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, cases, invoke, passed, write_lines
from foreign_folders import BLOCKS, FOLDERS, block_configs, llama, pruned
from foreign_folders import SIZES as SIZES_OF_LLAMA
from runs import Edit, config, edit_config, edit_weights, tensors, without
from safetensors.torch import load_file, save_file
from serving import PROMPTS, Serve, assert_same, job
from test_gguf import Server, furthest, save_tokenizer
from tiny_models import ROWS_OF_INT8, generate, load_model, state_quantization
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import ModelError
from ddp_vllm.formats import opened_in_place
from ddp_vllm.model_facts import dense_kv_bytes, describe_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_answers", "no_pictures")]

TOOLS = [tool for tool in FOLDERS if tool != "Torch-Pruning" or find_spec("torch_pruning")]
IN_PLACE = ("Puzzletron", "LLM-Drop")
LEFT_OUT = {"LLM-Drop": ("1.", "2.self_attn.", "2.input_")}  # by layer


def output_of(*words: object) -> str:
    return passed(invoke(*words)).output


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, Any]]:
    """Return a function that gives a tool's folder, what convert makes of it, and the model as the tool has it."""
    root, made = tmp_path_factory.mktemp("converted"), dict[str, tuple[Path, Path, Any]]()

    def get(tool: str) -> tuple[Path, Path, Any]:
        if tool not in made:
            model = FOLDERS[tool](root / tool)
            save_tokenizer(root / tool)
            passed(invoke("convert", root / tool, "-o", root / f"{tool}-converted"))
            made[tool] = root / tool, root / f"{tool}-converted", model
        return made[tool]

    return get


@pytest.mark.parametrize("proof", cases(["proving_here", "proving"], ["proving_here"]))
def test_a_fresh_process_finds_the_model_that_was_converted(
    proof: str, converted: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By its tokenizer; the tool's own code is not run, and without it transformers does not load its folder. Three
    processes start at night."""
    source = converted("FLAP")[0]
    request.getfixturevalue(proof)
    printed = output_of("convert", source, "-o", tmp_path / "out")
    found = read_checkpoint(tmp_path / "out").provenance["proof"]
    assert re.search(rf"read back: {found['tokens']} tokens the same, logits", printed)
    assert found["tokens"] > 100 and not found["fault"]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tools_model_computes_the_same_and_its_tensors_are_copied(tool: str, converted: Any) -> None:
    source, folder, model = converted(tool)
    ours = load_model(folder)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt + generate(ours, prompt)["tokens"]])
        torch.testing.assert_close(ours(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    before, after = (
        {name: tensor for file in sorted(place.rglob("*.safetensors")) for name, tensor in load_file(file).items()}
        for place in (source, folder)
    )
    left_out = tuple(f"model.layers.{part}" for part in LEFT_OUT.get(tool, ()))
    assert before.keys() - after.keys() == {name for name in before if name.startswith(left_out)}
    assert all(torch.equal(before[name], after[name]) for name in before.keys() & after.keys())
    added = after.keys() - before.keys()
    assert {name.rpartition(".")[2] for name in added} == ({"bias"} if tool == "FLAP" else set())
    assert not any(after[name].any() for name in added)


def quantized(folder: Path) -> Path:
    """Return a copy of a folder with INT8 weights, a scale per row, as compressed-tensors states and writes them.

    One of LLM-Drop has scales of dropped blocks too.
    """
    copy = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-int8")))
    for file in copy.glob("model*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            scale = tensors[name].abs().amax(1, keepdim=True) / 127
            tensors[name], tensors[f"{name}_scale"] = (tensors[name] / scale).round().to(torch.int8), scale
        save_file(tensors, file)
    (copy / "model.safetensors.index.json").unlink(missing_ok=True)
    (copy / "ddp_masks.safetensors").unlink(missing_ok=True)
    state_quantization(copy, ROWS_OF_INT8)
    return copy


@pytest.fixture(scope="session")
def served(serve: Serve, converted: Any) -> dict[str, Any]:
    """Return what real vLLM answers on folders that it opens as they are, and on converted ones."""
    jobs = {f"{tool} in place": job(converted(tool)[0]) for tool in IN_PLACE} | {"FLAP": job(converted("FLAP")[1])}
    in_place, folder = (job(quantized(place)) for place in converted("LLM-Drop")[:2])
    return serve(jobs | {"INT8 in place": in_place, "INT8": folder})


@pytest.mark.vllm
@pytest.mark.parametrize("case", ["FLAP", *(f"{tool} in place" for tool in IN_PLACE)])
def test_vllm_serves_what_transformers_computes(case: str, served: dict[str, Any], converted: Any) -> None:
    ours = load_model(converted(case.removesuffix(" in place"))[1])
    assert_same(served[case], {"outputs": [generate(ours, prompt) for prompt in PROMPTS]})


@pytest.mark.vllm
def test_a_quantized_folder_is_opened_as_it_is_too(served: dict[str, Any]) -> None:
    assert_same(served["INT8 in place"], served["INT8"])


def test_other_verbs_read_a_converted_folder(converted: Any, tmp_path: Path) -> None:
    """Although there are no masks to carry on; after recovery it still says where it is from."""
    source, folder, _ = converted("FLAP")
    assert "those of FLAP, which another tool pruned" in output_of("inspect", folder)
    assert json.loads(output_of("inspect", folder, "--json"))["recipe"] is None
    card = (folder / "README.md").read_text()
    assert "converted its folder FLAP and" in card and "masks" not in card.partition("## Load")[0]
    assert "masks" not in Path(output_of("report", folder, "-o", tmp_path).split()[-1]).read_text()
    words = ("apply", source, "--masks", folder / "ddp_masks.safetensors", "-o", tmp_path / "applied")
    assert_refused(invoke(*words), 3)
    passed(invoke("export", folder, "--outtype", "f32", "-o", tmp_path / "model.gguf"))
    assert furthest(load_model(folder), Server(tmp_path / "model.gguf")) < 1e-3
    llama(num_key_value_heads=12).save_pretrained(tmp_path / "dense")
    text = write_lines(tmp_path / "text.jsonl", ({"text": f"the fox {number} jumps"} for number in range(400)))
    passed(invoke("convert", source, "-o", tmp_path / "out", "--dense", tmp_path / "dense"))
    words = ("--tokens", "256", "--seq-len", "16", "--batch-size", "2", "--data", text)
    passed(invoke("recover", tmp_path / "out", "-o", tmp_path / "recovered", *words))
    assert read_checkpoint(tmp_path / "recovered").provenance["converted"]["from"] == "FLAP"
    assert "those of FLAP, which another tool pruned; then trained" in output_of("inspect", tmp_path / "recovered")


def _opened(**keys: Any) -> list[tuple[int, int, int]] | None:
    """Return the heads, KV heads and channels of each layer by a config that a tool wrote; None if it states none."""
    opened = opened_in_place({**LlamaConfig(**SIZES_OF_LLAMA).to_dict(), "model_type": "llama", **keys})
    layers = opened and [each.values() for each in opened["ddp_layers"]]
    return layers and [(sum(heads), len(heads), width) for heads, width in layers]


WHOLE, NO_ATTENTION, NO_MLP = (12, 4, 64), (0, 0, 64), (12, 4, 0)


@pytest.mark.parametrize(
    ("keys", "layer"),
    [
        ({"per_layer_config": {"1": {"intermediate_size": 0}}}, NO_MLP),
        ({"per_layer_config": {"01": {"num_attention_heads": 0, "skip": None, "head_dim": None}}}, NO_ATTENTION),
        ({"block_configs": [{}, {"ffn": {"ffn_mult": 0.0, "intermediate_size": None}}, {}, {}]}, NO_MLP),
        ({"block_configs": [{}, {"attention": {"window_length": 256, "num_key_value_heads": 2}}, {}, {}],
          "sliding_window": 256, "model_type": "mistral"}, (12, 2, 64)),
        ({"block_configs": [{}] * 4, "per_layer_config": {"1": {"skip": ["mlp"]}}}, NO_MLP),
        ({"drop_attn_list": [False, True, False, False], "drop_mlp_list": []}, NO_ATTENTION),
        ({"drop_mlp_list": [1], "drop_attn_list": None}, NO_MLP),
        ({"drop_attn_list": [1], "per_layer_config": {"1": {"skip": ["mlp"]}}}, (0, 0, 0)),
        ({"drop_attn_list": [False] * 4, "drop_mlp_list": [False] * 4}, None),
        ({"per_layer_config": {"1": {"num_attention_heads": 3}}, "model_type": "gemma4_text"}, None),
        ({"block_configs": [{"mamba": {}}], "model_type": "nemotron_h"}, None),
    ],
    ids=str,
)  # fmt: skip
def test_widths_that_a_config_states(keys: dict[str, Any], layer: tuple[int, int, int] | None) -> None:
    assert _opened(**keys) == (layer and [WHOLE, layer, WHOLE, WHOLE])


@pytest.mark.parametrize("schema", ["asdict", "groups", "typed"])
def test_every_version_of_block_configs_states_the_same(schema: str) -> None:
    """In a type that transformers lacks, and with sizes in the blocks alone, as Nemotron-NAS has them."""
    stated = {"model_type": "nemotron-nas", "intermediate_size": None, "num_key_value_heads": None}
    assert _opened(block_configs=block_configs(schema), **stated) == BLOCKS


@pytest.mark.parametrize(
    ("part", "word"),
    [
        *(({"attention": {key: value}}, key) for key, value in (
            ("replace_with_linear", True), ("sparsify", ["2:4"]), ("k_eq_v", True), ("unheard_of", 1),
        )),
        ({"attention": {"window_length": 9}}, "sliding_window"),
        ({"attention": {"qk_head_dim": 16}}, "head_dim"),
        ({"ffn": {"hidden_act": "gelu"}}, "hidden_act"),
        ({"ffn": {"moe": {"num_local_experts": 8}}}, "moe"),
        ({"subblock_configs": [{"kind": "ffn", "name": "up"}, {"kind": "ffn", "name": "down"}]}, "several parts"),
        ({"subblock_configs": [{"kind": "mamba", "name": "mamba"}]}, "mamba"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_block_states_otherwise_is_refused(part: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=f"layer 1 .*{word}"):
        _opened(block_configs=[{}, part, {}, {}])


def test_a_stock_class_lacks_no_block() -> None:
    """Its tensors may still be there, and vLLM would serve them."""
    for key, value in (("drop_attn_list", [1]), ("per_layer_config", {"1": {"skip": ["mlp"]}})):
        with pytest.raises(ModelError, match="removes whole blocks, which no stock class can lack"):
            _opened(model_type="olmo2", **{key: value})


def test_a_dense_verb_takes_no_model_that_another_tool_pruned(converted: Any, tmp_path: Path) -> None:
    """Its tensors may be those of the dense model, so nothing else would show it."""
    folder = converted("LLM-Drop")[0]
    (tmp_path / "text.txt").write_text("the fox jumps " * 400)
    for words in (
        ("prune", folder, "--sparsity", 0.25, "--data", tmp_path / "text.txt", "-o", tmp_path / "out"),
        ("export", folder, "-o", tmp_path / "out.gguf"),
        ("eval", folder, "--text", tmp_path / "text.txt", "--against", folder, "-o", tmp_path / "eval"),
        ("quantize", folder, "--scheme", "W8A8", "-o", tmp_path / "out"),
    ):
        assert_refused(invoke(*words), 3, "another tool pruned it", "drop_attn_list", "run ddp-vllm convert")


Q, GATE = (f"model.layers.1.{name}.weight" for name in ("self_attn.q_proj", "mlp.gate_proj"))


def cut(name: str, length: int) -> Callable[[dict[str, torch.Tensor]], None]:
    axis = int(name.endswith(("down_proj.weight", "o_proj.weight")))
    return lambda found: found.update({name: found[name].narrow(axis, 0, length).contiguous()})


def heads(queries: int, kv_heads: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(found: dict[str, torch.Tensor]) -> None:
        for name, count in (("q", queries), ("k", kv_heads), ("v", kv_heads), ("o", queries)):
            cut(f"model.layers.1.self_attn.{name}_proj.weight", 32 * count)(found)

    return edit


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def indexed(folder: Path) -> None:
    """Rename the one file to the first of two, and let an index name both."""
    names = load_file(folder / "model.safetensors")
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (folder / "model.safetensors").rename(folder / parts[0])
    weight_map = dict.fromkeys(names, parts[0]) | {"model.norm.weight": parts[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def norms_alone(found: dict[str, torch.Tensor]) -> None:
    for name in [name for name in found if name.startswith("model.layers.1.mlp.")]:
        del found[name]
    found["model.layers.1.mlp.down_proj.bias"] = torch.ones(48)


REFUSED: dict[str, tuple[Edit, list[str]]] = {  # how a folder is made unfit, what the line says
    "gate and up differ": (tensors(cut(GATE, 39)), ["layers.1.mlp.gate_proj.weight has shape [39, 48]", "require 40"]),
    "groups with two readings": (tensors(heads(5, 2)), ["5 query heads for 2 KV heads", "which share one"]),
    "a matrix is missing": (without(GATE), ["layer 1 lacks the tensors of mlp.gate_proj"]),
    "a config that lies": (config(per_layer_config={"1": {"intermediate_size": 41}}), ["layer 1 has", "40", "states"]),
    "nothing is pruned": (
        tensors(lambda found: [found.update({name: found[name.replace(".1.", ".0.")].clone()}) for name in [*found]]),
        ["vLLM serves it as it is"],
    ),
    "a head that is not the embedding it is tied to": (
        config(tie_word_embeddings=True),
        ["lm_head.weight differs from model.embed_tokens.weight", "set tie_word"],
    ),
    "a bias alone": (tensors(norms_alone), ["down_proj.bias", "constant"]),
    "no kind of model": (config(model_type=None), ["config.json has no model_type", "again"]),
    "a list in place of the config": (
        lambda folder: (folder / "config.json").write_text("[]"),
        ["config.json is not an object", "again"],
    ),
    "an index that names a missing file": (indexed, ["model-00002-of-00002.safetensors is not a file"]),
    "an index without any of its files": (
        lambda folder: (indexed(folder), (folder / "model-00001-of-00002.safetensors").unlink()),
        ["model-00001-of-00002.safetensors is not a file"],
    ),
    "pickles": (pickled, ["has no model*.safetensors", "pickles are not opened"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_fits_no_checkpoint_is_one_line(case: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    pruned(folder)
    spoil, words = REFUSED[case]
    spoil(folder)
    assert_refused(invoke("convert", folder, "-o", out), 3, *words)
    assert not out.exists()


def of_heads(folder: Path, family: str, counts: Sequence[int], stated: int, queries: int = 1) -> None:
    """Save a model with `counts` heads of 8 in its layers, `stated` heads in config.json, and no head_dim."""
    sizes = {**SIZES_OF_LLAMA, "hidden_size": 64, "num_hidden_layers": len(counts), "head_dim": 8}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8 // queries}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    model.save_pretrained(folder)

    def edit(found: dict[str, torch.Tensor]) -> None:
        for name in (name for name in [*found] if ".self_attn." in name and "norm" not in name):
            heads, projection = counts[int(name.split(".")[2])], name.split(".")[-2]
            length = 8 * heads if projection in "q_proj o_proj" else 8 * heads // queries
            found[name] = found[name].narrow(int(projection == "o_proj"), 0, length).contiguous()

    edit_weights(folder, edit)
    known = {"num_attention_heads": stated, "num_key_value_heads": max(1, stated // queries)}
    edit_config(folder, lambda found: found.pop("head_dim", None), **known)


HALF = [8, 4, 4, 4]
HEADS: list[tuple[str, Sequence[int], int, int, bool]] = [  # family, heads, stated heads, queries per KV head, clear
    ("qwen2", HALF, 4, 1, False),  # one layer is spared, and config.json has the heads of another one
    ("llama", HALF, 8, 1, False),  # the dense model's heads, but the other reading fits too
    ("qwen2", [8, 8, 8, 8], 8, 1, True),  # every layer has them
    ("qwen3", HALF, 4, 1, True),  # a norm is as long as a head
]


@pytest.mark.parametrize(("family", "counts", "stated", "queries", "clear"), HEADS)
def test_the_size_of_a_head_is_not_guessed(
    family: str, counts: Sequence[int], stated: int, queries: int, clear: bool, tmp_path: Path
) -> None:
    """Without head_dim only a number of heads tells it, which may be that of a pruned layer."""
    of_heads(tmp_path / "model", family, counts, stated, queries)
    for name in ("gate", "up", "down"):
        edit_weights(tmp_path / "model", cut(f"model.layers.0.mlp.{name}_proj.weight", 40))
    if not clear:
        words = ["no head_dim", f"{8 * max(counts)} columns", "--dense"]
        assert_refused(invoke("convert", tmp_path / "model", "-o", tmp_path / "out"), 3, *words)
    of_heads(tmp_path / "dense", family, [8] * 4, 8, queries)
    dense = () if clear else ("--dense", tmp_path / "dense")
    passed(invoke("convert", tmp_path / "model", "-o", tmp_path / "out", *dense))
    layers = read_checkpoint(tmp_path / "out").layers
    assert [layer.query_heads_per_kv_head for layer in layers] == [(queries,) * (count // queries) for count in counts]


def test_a_hub_name_of_the_dense_model_gives_its_sizes_if_it_is_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder, snapshot = tmp_path / "model", tmp_path / "hub" / "models--me--dense" / "snapshots" / "abc"
    of_heads(folder, "qwen2", HALF, 4)
    words = ("convert", folder, "-o", tmp_path / "out", "--dense", "me/dense")
    assert_refused(invoke(*words), 3, "hf download me/dense")
    of_heads(snapshot, "qwen2", [8] * 4, 8)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    save_tokenizer(snapshot)
    output = output_of(*words)
    assert "no tokenizer; that of" in output
    checkpoint = read_checkpoint(tmp_path / "out")
    assert checkpoint.widths.head_dim == checkpoint.config["num_attention_heads"] == 8
    assert "dense sizes from me/dense" in output_of("inspect", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_without_a_statement_only_the_bias_of_the_output_counts(tmp_path: Path) -> None:
    """Those of q, k and v add nothing where there are no heads."""
    llama(attention_bias=True).save_pretrained(tmp_path / "model")

    def edit(found: dict[str, torch.Tensor]) -> None:
        for name in [name for name in found if ".1.self_attn." in name and not name.endswith("_proj.bias")]:
            cut(name, 0)(found)  # as some tools write what they emptied
        found.pop("model.layers.1.self_attn.o_proj.bias")

    edit_weights(tmp_path / "model", edit)
    output = output_of("convert", tmp_path / "model", "-o", tmp_path / "out")
    assert "removed: attention of layer 1, because the folder has no tensors of it" in output


def test_a_missing_file_is_no_removed_layer(tmp_path: Path) -> None:
    """Files that end at the borders of layers, without an index."""
    folder = tmp_path / "model"
    pruned(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number, layers in ((1, ".0. .1. embed"), (2, ".2."), (3, ".3. model.norm lm_head")):
        part = {name: each for name, each in tensors.items() if any(word in name for word in layers.split())}
        save_file(part, folder / f"model-{number:05}-of-00003.safetensors")
    passed(invoke("convert", folder, "-o", tmp_path / "out"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    again = ("convert", folder, "-o", tmp_path / "out", "--overwrite")
    assert_refused(invoke(*again), 3, "2 weight files", "is one of 3")
    for number in (1, 3):
        (folder / f"model-{number:05}-of-00003.safetensors").rename(folder / f"model-{number}.safetensors")
    assert "removed: MLP of layer 2, because the folder has no tensors of it" in output_of(*again)


def test_facts_of_a_folder_that_is_opened_as_it_is(
    converted: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for tool in IN_PLACE:
        source, folder, _ = converted(tool)
        (tmp_path / tool).symlink_to(source)  # a path that was not described before
        facts, expected = describe_model(str(tmp_path / tool)), describe_model(str(folder))
        assert f"{tool}: another tool pruned it; vLLM with ddp-vllm opens it as it is" in caplog.text
        assert (facts.pruned, facts.parameters) == (True, expected.parameters)
        assert facts.kv_bytes_per_token == expected.kv_bytes_per_token and facts.weight_bytes
        assert dense_kv_bytes(source, value_bytes=2) == 2 * 2 * 32 * 4 * 4
