"""What is evaluated is what is exported; the folder is whole, loads in plain transformers, and can be cut again."""

import dataclasses
import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ddp_models import writing
from ddp_models.loading import load_model
from ddp_models.source import Source, open_source
from ddp_prune import export as export_module
from ddp_prune.export import apply_masks, export
from ddp_prune.gates import GatedModel, Masks
from ddp_prune.masks_file import read_masks, read_scores
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.cli import main
from ddp_vllm.errors import CheckpointError, OutputError
from ddp_vllm.families import unit_shapes
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.pages.card import model_card
from ddp_vllm.pages.summary import removed_parameters, units

TOKENS = torch.randint(1, 320, (2, 24), generator=torch.Generator().manual_seed(0))
LOAD = """
import sys
for name in ("ddp_vllm", "ddp_prune", "ddp_plugins", "ddp_benchmarks"):
    sys.modules[name] = None  # an editable install would make them importable
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("pruned", trust_remote_code=True)
AutoTokenizer.from_pretrained("pruned")
tokens = load_file("tokens.safetensors")["tokens"]
with torch.no_grad():
    save_file({"logits": model(tokens).logits}, "logits.safetensors")
"""


def _gates(source: Source, head_unit: str, case: str) -> Masks:
    """Random scales with random holes; `case` says which blocks of layers 0, 1 and 2 are gone."""
    generator = torch.Generator().manual_seed(len(case))
    gates = {}
    for kind, shape in unit_shapes(source.sizes, head_unit).items():
        scales = torch.rand(shape, generator=generator) * 1.5 + 0.05
        holes = torch.rand(shape, generator=generator) < 0.3
        holes[:, 0] = False  # no block is gone by chance
        gates[kind] = scales.masked_fill(holes, 0.0)
    if head_unit == "query-head":
        gates["attn"][2] = torch.tensor([0.5, 0.0, 1.1, 0.7, 0.0, 0.0, 0.0, 0.9])  # uneven groups, one KV head gone
    for layer, removed in enumerate(case.split("-")):
        for kind in removed.split("+"):
            if kind in gates:
                gates[kind][layer] = 0.0
    return gates


def _logits(model: Any, tokens: torch.Tensor = TOKENS, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **inputs).logits


def _evaluated(source: Source, gates: Masks, head_unit: str) -> torch.Tensor:
    gated = GatedModel(load_model(source, "float32"), source.family, source.sizes, head_unit)
    with gated.masks(gates):
        return _logits(gated.model)


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@pytest.fixture(scope="module")
def source(tiny_model: Path) -> Source:
    return open_source(str(tiny_model))


@pytest.fixture
def pruned(source: Source, tmp_path: Path) -> Path:
    """KV groups; layer 0 without attention, layer 1 without anything."""
    output = tmp_path / "pruned"
    provenance = {"recipe": {"model": "owner/tiny", "data": "a.jsonl"}}
    export(source, _gates(source, "kv-group", "attn-attn+mlp-"), output, head_unit="kv-group", provenance=provenance)
    return output


@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
@pytest.mark.parametrize("case", ["", "attn", "mlp", "attn+mlp", "attn-mlp", "-attn+mlp-", "--attn+mlp"])
def test_what_is_evaluated_is_what_is_exported(case: str, head_unit: str, source: Source, tmp_path: Path) -> None:
    gates = _gates(source, head_unit, case)
    export(source, gates, tmp_path / "pruned", head_unit=head_unit, provenance={})
    evaluated = _evaluated(source, gates, head_unit)
    torch.testing.assert_close(_logits(_load(tmp_path / "pruned")), evaluated, atol=1e-5, rtol=0)
    dense = _logits(load_model(source, "float32"))
    assert (dense - evaluated).abs().max() > 0.1  # the masks do something

    checkpoint = read_checkpoint(tmp_path / "pruned")
    counts, sizes = {label: left for label, _, left in units(checkpoint)}, source.sizes
    heads = gates["attn"].repeat_interleave(sizes.num_query_heads // gates["attn"].shape[1], dim=1) > 0
    assert counts["query heads"] == int(heads.sum())
    assert counts["KV heads"] == int(heads.view(sizes.num_layers, sizes.num_kv_heads, -1).any(-1).sum())
    assert counts["MLP channels"] == int((gates["mlp"] > 0).sum())
    num_dense = load_model(source, "float32").num_parameters()
    assert checkpoint.num_parameters + removed_parameters(checkpoint) == num_dense


def test_loads_where_ddp_vllm_is_not_installed(pruned: Path, source: Source) -> None:
    save_file({"tokens": TOKENS}, pruned.parent / "tokens.safetensors")
    command = [sys.executable, "-I", "-c", LOAD]
    result = subprocess.run(command, capture_output=True, text=True, cwd=pruned.parent)
    assert result.returncode == 0, result.stderr
    logits = load_file(pruned.parent / "logits.safetensors")["logits"]
    expected = _evaluated(source, _gates(source, "kv-group", "attn-attn+mlp-"), "kv-group")
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
def test_greedy_tokens_are_the_same_with_and_without_the_kv_cache(
    head_unit: str, source: Source, tmp_path: Path
) -> None:
    """Layer 0 has no attention: the one whose KV cache counts the tokens."""
    export(source, _gates(source, head_unit, "attn"), tmp_path / "out", head_unit=head_unit, provenance={})
    model = _load(tmp_path / "out")
    model.generation_config.eos_token_id = None
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(TOKENS)
    cached, plain = (
        model.generate(TOKENS, attention_mask=mask, use_cache=use_cache, **settings) for use_cache in (True, False)
    )
    assert cached.shape == (2, 36) and torch.equal(cached, plain)
    with torch.no_grad():  # by hand, where the model asks its cache for the positions
        first = model(TOKENS[:, :20], use_cache=True)
        second = model(TOKENS[:, 20:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), _logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["attn", "attn-attn-attn"])
def test_left_padding_changes_nothing(case: str, source: Source, tmp_path: Path) -> None:
    export(source, _gates(source, "query-head", case), tmp_path / "out", head_unit="query-head", provenance={})
    model = _load(tmp_path / "out")
    model.generation_config.eos_token_id = None
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.int64), TOKENS], dim=1)
    mask = (padded != 0).long()
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), **settings)
    assert torch.equal(model.generate(padded, attention_mask=mask, **settings)[:, 5:], expected)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = _logits(model, padded, attention_mask=mask, position_ids=positions)[:, 5:]
    torch.testing.assert_close(logits, _logits(model), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A Llama with random biases on every projection, bfloat16, untied embeddings."""
    folder = tmp_path_factory.mktemp("biased")
    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(tiny_model, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def test_biases_are_cut_and_those_of_removed_blocks_go(biased: Path, tmp_path: Path) -> None:
    """A removed block adds nothing, its output bias included, with gates as on disk."""
    source = open_source(str(biased))
    gates = _gates(source, "query-head", "attn-mlp-")
    export(source, gates, tmp_path / "out", head_unit="query-head", provenance={})
    checkpoint = read_checkpoint(tmp_path / "out")
    biases = {name.removeprefix("model.layers.") for name in checkpoint.shapes if name.endswith(".bias")}
    assert not {"0.self_attn.o_proj.bias", "0.self_attn.q_proj.bias", "1.mlp.down_proj.bias"} & biases
    assert {"0.mlp.down_proj.bias", "1.self_attn.o_proj.bias", "2.mlp.up_proj.bias"} <= biases
    num_dense = LlamaForCausalLM.from_pretrained(biased).num_parameters()
    assert checkpoint.num_parameters + removed_parameters(checkpoint) == num_dense

    gated = GatedModel(load_model(source, "float32"), source.family, source.sizes, "query-head")
    with gated.masks(gates):
        expected = _logits(gated.model)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True, dtype=torch.float32)
    difference = (_logits(model).log_softmax(-1).exp() - expected.softmax(-1)).abs().max()
    assert difference < 0.02  # the folded weights are rounded to bfloat16


def test_gates_are_folded_in_float32_and_rounded_once(biased: Path, tmp_path: Path) -> None:
    source = open_source(str(biased))
    gates = _gates(source, "kv-group", "")
    export(source, gates, tmp_path / "out", head_unit="kv-group", provenance={})
    dense, cut = (load_file(folder / "model.safetensors") for folder in (biased, tmp_path / "out"))
    assert {tensor.dtype for tensor in cut.values()} == {torch.bfloat16}
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        keep = gates["mlp"][layer] > 0
        expected = (dense[name][:, keep].float() * gates["mlp"][layer][keep]).to(torch.bfloat16)
        assert torch.equal(cut[name], expected)
        rows = f"model.layers.{layer}.mlp.up_proj.weight"
        assert torch.equal(cut[rows], dense[rows][keep])


def test_the_folder_is_whole(pruned: Path, tiny_model: Path) -> None:
    names = {path.name for path in pruned.iterdir()}
    expected = {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "README.md", "ddp_masks.safetensors", "widths.py", "configuration_ddp.py", "modeling_ddp.py",
    }  # fmt: skip
    assert expected <= names
    dense = json.loads((tiny_model / "config.json").read_text())
    config = json.loads((pruned / "config.json").read_text())
    ours = {"architectures", "model_type", "auto_map", "ddp_layers"}
    assert {key: config[key] for key in dense if key not in ours} == {
        key: value for key, value in dense.items() if key not in ours
    }
    assert (config["model_type"], config["architectures"]) == ("ddp_llama", ["DDPLlamaForCausalLM"])
    assert config["head_dim"] == 8 and config["ddp_layers"][1] == {
        "query_heads_per_kv_head": [], "intermediate_size": 0,
    }  # fmt: skip


def test_a_full_disk_is_said_in_one_line_and_leaves_nothing(pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Files may grow to 20 kB here; safetensors has an error of its own for that."""
    arguments = ["apply", str(tiny_model), "--masks", str(pruned / MASKS_FILE), "-o", str(tmp_path / "out")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        result = CliRunner().invoke(main, arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 5 and result.stderr.count("\n") == 1, result.output
    assert f"{tmp_path / 'out'} cannot be written" in result.stderr and "make room" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["pruned"]


def test_further_chat_templates_travel_too(tiny_model: Path, tmp_path: Path) -> None:
    """transformers writes the default one beside the tokenizer, and the others in a folder of their own."""
    dense = shutil.copytree(tiny_model, tmp_path / "dense")
    tokenizer = AutoTokenizer.from_pretrained(dense)
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tokenizer.save_pretrained(dense)
    source = open_source(str(dense))
    export(source, _gates(source, "kv-group", ""), tmp_path / "out", head_unit="kv-group", provenance={})
    assert AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True).chat_template == {
        "default": "plain", "tool_use": "with tools",
    }  # fmt: skip


def test_the_model_card_states_the_widths(pruned: Path) -> None:
    card = (pruned / "README.md").read_text()
    layers = read_checkpoint(pruned).layers
    assert "base_model: owner/tiny" in card and "vllm serve ./pruned\n" in card
    assert f"| 0 | – | – | {layers[0].intermediate_size} |" in card and "| 1 | – | – | – | 0% |" in card
    heads = layers[2].query_heads_per_kv_head
    assert re.search(rf"\| 2 \| {len(heads)} \| {sum(heads)}[ ()\d]* \| {layers[2].intermediate_size} \|", card)
    channels = sum(layer.intermediate_size for layer in layers)
    assert f"| MLP channels | 288 | {channels} | {1 - channels / 288:.1%} |" in card


def test_the_model_card_names_each_text_once_and_no_folder(pruned: Path, tiny_model: Path) -> None:
    recipe = {"model": "owner/tiny", "data": "/mine/a.jsonl,/mine/a.jsonl, owner/b"}
    perplexity = {"tokens": 1024, "dense": 2.0, "pruned": 3.0}
    provenance = {"recipe": recipe, "texts": recipe["data"].split(","), "perplexity": perplexity}
    checkpoint = dataclasses.replace(read_checkpoint(pruned), provenance=provenance)
    card = model_card(checkpoint, "pruned")
    assert "1,024 tokens of a.jsonl, owner/b" in card and "/mine" not in card


def test_masks_alone_cut_the_same_checkpoint(pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    apply_masks(str(tiny_model), pruned / "ddp_masks.safetensors", tmp_path / "again", overwrite=False)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (pruned / name).read_bytes(), name
    (first, said), (second, says) = (read_masks(path / MASKS_FILE) for path in (pruned, tmp_path / "again"))
    assert all(torch.equal(first[kind], second[kind]) for kind in ("attn", "mlp")) and len(first) == len(second) == 2
    assert says == said | {"applied_to": tiny_model.name}


def test_applied_masks_keep_what_aligning_needs(tiny_model: Path, tmp_path: Path) -> None:
    source = open_source(str(tiny_model))
    gates = _gates(source, "query-head", "")
    scores = {name: {kind: values + add for kind, values in gates.items()} for name, add in (("z", 1), ("saliency", 2))}
    export(source, gates, tmp_path / "first", head_unit="query-head", provenance={}, scores=scores, overwrite=False)
    apply_masks(str(tiny_model), tmp_path / "first" / MASKS_FILE, tmp_path / "again", overwrite=False)
    kept = read_scores(tmp_path / "again" / MASKS_FILE)
    for name, masks in scores.items():
        for kind, values in masks.items():
            assert torch.equal(kept[name][kind], values), (name, kind)


def test_masks_of_another_model_are_refused(pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    config = LlamaConfig.from_pretrained(tiny_model, intermediate_size=80)
    LlamaForCausalLM(config).save_pretrained(other)
    with pytest.raises(CheckpointError, match=r"\[3, 96\].*\[3, 80\].*another model"):
        apply_masks(str(other), pruned / "ddp_masks.safetensors", tmp_path / "out", overwrite=False)
    for path in (pruned / "model.safetensors", pruned / "config.json", tmp_path / "none.safetensors"):
        with pytest.raises(CheckpointError, match="no masks file"):
            apply_masks(str(tiny_model), path, tmp_path / "out", overwrite=False)
    assert not (tmp_path / "out").exists()


def test_masks_that_are_no_gates_are_refused(pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    with safe_open(pruned / "ddp_masks.safetensors", framework="pt") as file:
        gates = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for value in (float("nan"), float("inf"), -0.5):
        gates["mlp.gates"][2, 3] = value
        save_file(gates, tmp_path / "masks.safetensors", {"ddp": "{}"})
        with pytest.raises(CheckpointError, match=r"mlp gates.*prune again"):
            apply_masks(str(tiny_model), tmp_path / "masks.safetensors", tmp_path / "out", overwrite=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("provenance", "words"),
    [
        ('{"recipe": [1]}', "its provenance.recipe is [1], no object"),
        ("[1]", "its provenance is [1], no"),
        ("{", "Expecting"),
    ],
)
def test_masks_that_say_nonsense_of_their_making_are_refused(
    provenance: str, words: str, pruned: Path, tiny_model: Path, tmp_path: Path
) -> None:
    masks = tmp_path / "masks.safetensors"
    save_file(load_file(pruned / MASKS_FILE), masks, {"ddp": provenance})
    arguments = ["apply", str(tiny_model), "--masks", str(masks), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 7, (result.output, result.exception)
    assert result.stderr.startswith(f"ddp-vllm: {masks} is no masks file (") and result.stderr.count("\n") == 1
    assert words in result.stderr and f"pass the {MASKS_FILE} of a pruned folder" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_existing_output_is_refused_and_replaced_on_request(
    pruned: Path, source: Source, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates, before = _gates(source, "kv-group", ""), (pruned / "model.safetensors").read_bytes()
    with pytest.raises(OutputError, match="--overwrite"):
        export(source, gates, pruned, head_unit="kv-group", provenance={})
    monkeypatch.setattr(export_module.UnitSlicer, "slice", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(source, gates, pruned, head_unit="kv-group", provenance={}, overwrite=True)
    assert (pruned / "model.safetensors").read_bytes() == before
    assert [path.name for path in pruned.parent.iterdir()] == ["pruned"]
    monkeypatch.undo()
    export(source, gates, pruned, head_unit="kv-group", provenance={}, overwrite=True)
    assert read_checkpoint(pruned).layers[1].num_kv_heads > 0
    assert [path.name for path in pruned.parent.iterdir()] == ["pruned"]


def test_shards_hold_what_one_file_holds(
    pruned: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MAX_SHARD_BYTES", 30_000)
    apply_masks(str(tiny_model), pruned / "ddp_masks.safetensors", tmp_path / "sharded", overwrite=False)
    files = sorted((tmp_path / "sharded").glob("model*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    whole, parts = load_file(pruned / "model.safetensors"), [load_file(file) for file in files]
    assert sum(map(len, parts)) == len(whole)
    for file, part in zip(files, parts, strict=True):
        for name, tensor in part.items():
            assert index["weight_map"][name] == file.name and torch.equal(tensor, whole[name])
    assert torch.equal(_logits(_load(tmp_path / "sharded")), _logits(_load(pruned)))


@pytest.mark.parametrize("dense_index", [True, False])
def test_a_sharded_dense_model_is_cut_like_a_whole_one(
    dense_index: bool, pruned: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Without its index the shards' names alone must do."""
    dense = tmp_path / "dense"
    LlamaForCausalLM.from_pretrained(tiny_model).save_pretrained(dense, max_shard_size="50KB")
    assert len(list(dense.glob("*.safetensors"))) > 2
    if not dense_index:
        (dense / "model.safetensors.index.json").unlink()
    apply_masks(str(dense), pruned / "ddp_masks.safetensors", tmp_path / "out", overwrite=False)
    whole, again = (load_file(folder / "model.safetensors") for folder in (pruned, tmp_path / "out"))
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize("width", [-1, 7.5, True, 97, 95], ids=str)
def test_remote_code_refuses_wrong_widths(width: Any, pruned: Path) -> None:
    """95 is a possible width, but not that of the weights."""
    config = json.loads((pruned / "config.json").read_text())
    config["ddp_layers"][2]["intermediate_size"] = width
    (pruned / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"ddp_layers.*{width}"):
        _load(pruned)
