"""The exported folder: whole, rounded once, and cut again from its masks. Its logits are in test_families.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, invoke
from runs import edit_json, small_files, weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ddp_prune.core.gates import Masks
from ddp_prune.export import apply_masks, export
from ddp_prune.masks_file import read_masks, read_scores
from ddp_prune.models import writing
from ddp_prune.models.source import Source, open_source
from ddp_vllm.families import unit_shapes
from ddp_vllm.masks import MASKS_FILE

TOKENS = torch.randint(1, 320, (2, 24), generator=torch.Generator().manual_seed(0))


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


def _load(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def source(tiny_model: Path) -> Source:
    return open_source(str(tiny_model))


@pytest.fixture
def pruned(source: Source, tmp_path: Path) -> Path:
    """KV groups; layer 0 without attention, layer 1 without anything; with scores, as `prune` writes them."""
    gates = _gates(source, "kv-group", "attn-attn+mlp-")
    scores = {name: {kind: values + add for kind, values in gates.items()} for name, add in (("z", 1), ("saliency", 2))}
    export(source, gates, tmp_path / "pruned", head_unit="kv-group", provenance={"texts": ["a"]}, scores=scores)
    return tmp_path / "pruned"


@pytest.mark.parametrize("case", ["attn", "attn-attn-attn"])
def test_neither_the_kv_cache_nor_left_padding_changes_tokens(case: str, source: Source, tmp_path: Path) -> None:
    """Layer 0 has no attention: the one whose KV cache counts the tokens."""
    export(source, _gates(source, "query-head", case), tmp_path / "out", head_unit="query-head", provenance={})
    model, settings = _load(tmp_path / "out"), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.int64), TOKENS], dim=1)
    mask = (padded != 0).long()
    cached = model.generate(TOKENS, attention_mask=mask[:, 5:], **settings)
    plain = model.generate(TOKENS, attention_mask=mask[:, 5:], use_cache=False, **settings)
    assert cached.shape == (2, 36) and torch.equal(cached, plain)
    assert torch.equal(model.generate(padded, attention_mask=mask, **settings)[:, 5:], cached)
    with torch.no_grad():  # by hand, where the model asks its cache for the positions
        first = model(TOKENS[:, :20], use_cache=True)
        second = model(TOKENS[:, 20:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), _logits(model), atol=1e-4, rtol=0)
    logits = _logits(model, padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))[:, 5:]
    torch.testing.assert_close(logits, _logits(model), atol=1e-4, rtol=0)


def test_gates_are_folded_in_float32_and_rounded_once(tiny_model: Path, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    source = open_source(str(tmp_path / "dense"))
    gates = _gates(source, "kv-group", "")
    export(source, gates, tmp_path / "out", head_unit="kv-group", provenance={})
    dense, cut = weights(tmp_path / "dense"), weights(tmp_path / "out")
    assert {tensor.dtype for tensor in cut.values()} == {torch.bfloat16}
    for layer in range(3):
        down, up = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("down", "up"))
        keep = gates["mlp"][layer] > 0
        assert torch.equal(cut[down], (dense[down][:, keep].float() * gates["mlp"][layer][keep]).to(torch.bfloat16))
        assert torch.equal(cut[up], dense[up][keep])


def test_the_folder_is_whole(pruned: Path, tiny_model: Path) -> None:
    assert {path.name for path in pruned.iterdir()} >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "README.md", MASKS_FILE, "widths.py", "configuration_ddp.py", "modeling_ddp.py",
    }  # fmt: skip
    dense, config = (json.loads((folder / "config.json").read_text()) for folder in (tiny_model, pruned))
    assert {key for key in config.keys() | dense.keys() if config.get(key) != dense.get(key)} == {
        "architectures", "model_type", "auto_map", "ddp_layers", "per_layer_config",
        "base_architecture",
    }  # fmt: skip
    assert (config["model_type"], config["architectures"]) == ("ddp_llama", ["DDPLlamaForCausalLM"])
    assert config["ddp_layers"][1] == {"query_heads_per_kv_head": [], "intermediate_size": 0}


def test_a_full_disk_is_said_in_one_line_and_leaves_nothing(pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    """safetensors has an error of its own for that."""
    with small_files(20_000):
        result = invoke("apply", tiny_model, "--masks", pruned / MASKS_FILE, "-o", tmp_path / "out")
    assert_refused(result, 5, f"{tmp_path / 'out'} cannot be written", "make room")
    assert [path.name for path in tmp_path.iterdir()] == ["pruned"]


@pytest.mark.parametrize("stored", ["one file", "shards", "shards without an index"])
def test_masks_alone_cut_the_same_checkpoint(
    stored: str, pruned: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the scores that aligning needs. A model that is stored in shards is written in shards, if they are small."""
    dense = tiny_model
    if stored != "one file":
        monkeypatch.setattr(writing, "MAX_SHARD_BYTES", 30_000)
        dense = tmp_path / "dense"
        LlamaForCausalLM.from_pretrained(tiny_model).save_pretrained(dense, max_shard_size="50KB")
        assert len(list(dense.glob("*.safetensors"))) > 2
    if stored == "shards without an index":  # their names alone must do
        (dense / "model.safetensors.index.json").unlink()
    apply_masks(str(dense), pruned / MASKS_FILE, again := tmp_path / "again", overwrite=False)
    (first, said), (second, says) = (read_masks(path / MASKS_FILE) for path in (pruned, again))
    assert all(torch.equal(first[kind], second[kind]) for kind in ("attn", "mlp")) and len(first) == len(second) == 2
    assert says == said | {"applied_to": dense.name}
    scores, kept = (read_scores(path / MASKS_FILE) for path in (pruned, again))
    assert all(torch.equal(kept[name][kind], scores[name][kind]) for name in ("z", "saliency") for kind in first)
    if stored == "one file":
        for name in ("model.safetensors", "config.json"):
            assert (again / name).read_bytes() == (pruned / name).read_bytes(), name
        return
    files = sorted(again.glob("model*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((again / "model.safetensors.index.json").read_text())["weight_map"]
    whole = weights(pruned)
    assert index.keys() == whole.keys()
    for file in files:
        for name, tensor in load_file(file).items():
            assert index[name] == file.name and torch.equal(tensor, whole[name])
    assert torch.equal(_logits(_load(again)), _logits(_load(pruned)))


@pytest.mark.parametrize("width", [7.5, 97, 95], ids=str)
def test_remote_code_refuses_wrong_widths(width: Any, pruned: Path) -> None:
    """95 is a possible width, but not that of the weights."""
    layers = json.loads((pruned / "config.json").read_text())["ddp_layers"]
    layers[2]["intermediate_size"] = width
    edit_json(pruned / "config.json", ddp_layers=layers)
    with pytest.raises(ValueError, match=rf"ddp_layers.*{width}"):
        _load(pruned)


SHARD_BYTES = 20_000_000
MEASURE = """
import sys, threading, time
from pathlib import Path

import torch
from ddp_prune.models import writing
from ddp_prune import export
from ddp_vllm.families import unit_shapes
from ddp_prune.models.source import open_source

def own():  # bytes of this process's own memory; of the mapped files only pages in use are in memory, and can go
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while not done.is_set():
        most[0] = max(most[0], own())
        time.sleep(0.001)

def run(model, output):
    source = open_source(model)
    gates = {kind: torch.rand(shape) + 0.5 for kind, shape in unit_shapes(source.sizes, "kv-group").items()}
    export.export(source, gates, Path(output), head_unit="kv-group", provenance={})

writing.MAX_SHARD_BYTES = int(sys.argv[4])
run(sys.argv[1], sys.argv[3] + "-tiny")  # imports what it needs
began, done = own(), threading.Event()
most = [began]
watcher = threading.Thread(target=watch)
watcher.start()
run(sys.argv[2], sys.argv[3])
done.set()
watcher.join()
print(most[0] - began)
"""


@pytest.mark.nightly
def test_export_holds_a_shard_whatever_the_model(tiny_model: Path, tmp_path: Path) -> None:
    """Nothing is cut here, only folded, so all of the model passes through."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=10, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(tmp_path / "dense", max_shard_size="50MB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 5
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert num_bytes > 300_000_000
    arguments = [str(tiny_model), str(tmp_path / "dense"), str(tmp_path / "out"), str(SHARD_BYTES)]
    root = Path(__file__).parents[2]
    environment = {
        "PYTHONPATH": f"{root}:{root / 'prune'}", "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # larger blocks return to the system when they are freed
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    held = int(result.stdout)
    largest = 4096 * 1024
    # a shard, and of the largest matrix: as read, folded in float32, and rounded
    assert SHARD_BYTES / 2 < held < 1.5 * SHARD_BYTES + (2 + 4 + 4 + 2) * largest, f"{held:,} bytes held"
    assert held < num_bytes / 3
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 10
