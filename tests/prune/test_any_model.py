"""Architectures without a row in `FAMILIES`: what is found in them, and masked = exported = read by transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import MODELS, UNSERVED, stack_experts, tiny_config, write_headers
from commands import invoke, passed
from runs import edit_weights, export_whole, prune, recover, weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationMixin

from ddp_prune.core.gates import GatedModel, Masks, NarrowLayers
from ddp_prune.core.weights import UpdatedWeights
from ddp_prune.export import export
from ddp_prune.models.evaluation import PROMPTS
from ddp_prune.models.loading import check_head, load_model
from ddp_prune.models.source import Source, open_source
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import ModelError, TrainingError
from ddp_vllm.families import unit_shapes
from ddp_vllm.masks import MASKS_FILE, read_masks_file
from ddp_vllm.pages.summary import removed_parameters
from ddp_vllm.remote_code.module_widths import Block

TOKENS = torch.arange(5, 37)[None]
PLAIN = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXPERTS = tuple(name.replace("mlp.", "mlp.experts.{}.") for name in PLAIN)
MLP = {  # model -> the module of its layers on disk, the projections of its MLPs
    "falcon_h1": ("model.layers", tuple(name.replace("mlp", "feed_forward") for name in PLAIN)),
    "olmo2": ("model.layers", PLAIN),
    "olmo3": ("model.layers", PLAIN),
    "glm4": ("model.layers", ("mlp.gate_up_proj", "mlp.down_proj")),
    "gemma4_text": ("model.layers", PLAIN),
    "gemma4": ("model.language_model.layers", PLAIN),
    "gemma4_moe": ("model.layers", PLAIN),  # its experts are left alone
    "granitemoehybrid": ("model.layers", ("shared_mlp.input_linear", "shared_mlp.output_linear")),
    "seed_oss": ("model.layers", PLAIN),
    "hunyuan_v1_dense": ("model.layers", PLAIN),
    "cohere2": ("model.layers", PLAIN),
    "starcoder2": ("model.layers", ("mlp.c_fc", "mlp.c_proj")),
    "phi": ("model.layers", ("mlp.fc1", "mlp.fc2")),
    "gpt_neox": ("gpt_neox.layers", ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")),
    "qwen3_5": ("model.language_model.layers", PLAIN),
    "mistral3": ("language_model.model.layers", PLAIN),
}
ROUTED = {  # mixture of experts -> the same of one expert
    "qwen3_next": ("model.layers", EXPERTS),
    "qwen3_5_moe": ("model.language_model.layers", EXPERTS),
    "glm4_moe": ("model.layers", EXPERTS),
    "deepseek_v3": ("model.layers", EXPERTS),
    "ernie4_5_moe": ("model.layers", EXPERTS),
    "minimax_m2": ("model.layers", tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
    "exaone_moe": ("model.layers", EXPERTS),
    "hunyuan_v1_moe": ("model.layers", EXPERTS),
    **dict.fromkeys(("qwen3_moe", "qwen2_moe", "olmoe", "deepseek", "deepseek_v2"), ("model.layers", EXPERTS)),
}
ROUTED["mixtral"] = ROUTED["minimax_m2"]
FAST = ("falcon_h1", "olmo2", "qwen3_5", "starcoder2", "glm4_moe", "mixtral", "deepseek")
CASES = [pytest.param(name, marks=[] if name in FAST else pytest.mark.nightly) for name in {**MLP, **ROUTED}]


def random_gates(source: Source) -> Masks:
    """Scales around 1; four of ten units are removed, the MLP of the first row and one expert whole."""
    generator = torch.Generator().manual_seed(0)
    gates = {
        kind: (torch.rand(shape, generator=generator) + 0.5) * (torch.rand(shape, generator=generator) < 0.6)
        for kind, shape in unit_shapes(source.sizes, "kv-group").items()
    }
    if "mlp" in gates:
        gates["mlp"][0] = 0.0
    if "experts" in gates:
        gates["experts"][0, 1] = 0.0
    return gates


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def read_again(folder: Path) -> Any:
    """Load a pruned folder as transformers without ddp-vllm does, by the file in the folder."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    kinds = AutoModelForImageTextToText, AutoModelForCausalLM
    kind = next(each for each in kinds if type(config) in each._model_mapping)
    return kind.from_pretrained(folder, config=config, trust_remote_code=True, dtype=torch.float32).eval()


def test_every_model_has_a_case() -> None:
    assert {*MLP, *ROUTED} == {*MODELS, *UNSERVED} - {"gpt_oss"}


@pytest.mark.parametrize("name", CASES)
def test_masked_equals_exported(name: str, dense: Callable[[str], Path], tmp_path: Path) -> None:
    source = open_source(str(dense(name)))
    exact = torch.float32 if name == "gemma4_moe" else torch.float64  # torch.grouped_mm has no float64
    assert source.structure
    stated = source.structure.widths
    layers, projections = (MLP | ROUTED)[name]
    block: Any = stated.experts if name in ROUTED else stated.mlp
    assert (stated.layers_module, block.projections) == (layers, projections)
    assert source.sizes.blocks == (("experts",) if name in ROUTED else ("mlp",))
    source = source.with_blocks(source.prunable)  # of some mixtures the MLPs of the first layers too
    gates = random_gates(source)
    gated = GatedModel(load_model(source, "float32"), source.family, source.sizes, "kv-group")
    check_head(source, gated.model)
    whole = logits(gated.model)
    with gated.masks(gates):
        masked = logits(gated.model.to(exact))
    assert (masked - whole).abs().max() > 0.05 * whole.abs().max()  # the masks do something
    checkpoint = export(source, gates, tmp_path / "pruned", head_unit="kv-group", provenance={})
    torch.testing.assert_close(logits(read_again(tmp_path / "pruned").to(exact)), masked, atol=5e-6, rtol=0)
    config, stock = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "pruned", dense(name)))
    assert {key: config[key] for key in stock} == stock and set(config) - set(stock) == {
        "auto_map", "quantization_config"
    }  # fmt: skip
    cut = sum(int((values == 0).sum()) for values in gates.values()) - ("mlp" in gates)  # an MLP keeps one channel
    rows = sum(3 if len(each.inputs) == 2 or each.fused else 2 for each in (block,))
    num_dense = sum(tensor.numel() for tensor in weights(dense(name)).values())
    if not any(each.endswith("bias") for each in checkpoint.shapes if ".mlp." in each):
        assert num_dense - checkpoint.num_parameters == cut * rows * source.sizes.hidden_size
        assert num_dense == checkpoint.num_parameters + removed_parameters(checkpoint)


def test_everything_else_is_copied(dense: Callable[[str], Path], tmp_path: Path) -> None:
    """Byte for byte: attention, towers of other modalities, and heads that predict further tokens."""
    folder = shutil.copytree(dense("qwen3_5"), tmp_path / "dense")
    edit_weights(folder, lambda tensors: tensors.update({"mtp.layers.0.mlp.up_proj.weight": torch.rand(96, 64)}))
    source = open_source(str(folder))
    lines = list[str]()
    source.describe_rest(lines.append)
    assert lines == [
        "not pruned: attention and other token mixers, heads that predict further tokens, towers of other modalities"
    ]
    export(source, random_gates(source), tmp_path / "pruned", head_unit="kv-group", provenance={})
    before, after = weights(folder), weights(tmp_path / "pruned")
    changed = {name for name in before if name not in after or not torch.equal(before[name], after[name])}
    assert changed == {f"model.language_model.layers.{i}.{name}.weight" for i in range(3) for name in PLAIN}


@pytest.mark.parametrize("train", ["masks", pytest.param("weights", marks=pytest.mark.nightly)])
def test_experts_that_are_stacked_on_disk(
    train: str, dense: Callable[[str], Path], tiny_text: Path, tmp_path: Path, no_pictures: None
) -> None:
    """As the publisher stores Qwen3.5: they are written one by one, because their widths differ."""
    folder = shutil.copytree(dense("qwen3_5_moe"), tmp_path / "dense")
    stack_experts(folder)
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in weights(folder)
    made = [tmp_path / "of-single", tmp_path / "of-stacked"]
    for each, output in zip((dense("qwen3_5_moe"), folder), made, strict=True):
        passed(prune(each, tiny_text, output, "--train", train))
    single, stacked = map(weights, made)
    assert single.keys() == stacked.keys() and all(torch.equal(single[name], stacked[name]) for name in single)
    if train == "weights":
        trained = [name for name, value in weights(dense("qwen3_5_moe")).items() if name in single]
        assert any("o_proj" in name and not torch.equal(single[name], stacked[name] * 0) for name in trained)


@pytest.mark.parametrize("name", ["glm4", "starcoder2"])
def test_narrow_equals_masked(name: str, dense: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed channels are left out of fused gate and up projections, and of MLPs without a gate and with biases."""
    monkeypatch.setattr("ddp_prune.core.gates.CHANNEL_BLOCK", 8)
    source = open_source(str(dense(name)))
    gated, gates = GatedModel(load_model(source, "float32"), source.family, source.sizes, ""), random_gates(source)
    narrow = NarrowLayers(gated)
    narrow.follow({kind: values > 0 for kind, values in gates.items()})
    assert [None if kept is None else len(kept) % 8 for kept in narrow.kept["mlp"]] == [0, 0, 0]
    with gated.masks(gates):
        masked = logits(gated.model)
    with gated.masks(gates, None, narrow):
        torch.testing.assert_close(logits(gated.model), masked, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["glm4_moe", pytest.param("olmo2", marks=pytest.mark.nightly)])
def test_the_commands(name: str, dense: Callable[[str], Path], tiny_text: Path, tmp_path: Path) -> None:
    result = passed(prune(dense(name), tiny_text, tmp_path / "pruned", "--budget", "params"))
    assert "not pruned: attention" in result.output
    checkpoint = read_checkpoint(tmp_path / "pruned")
    assert 0 < checkpoint.removed < 0.4
    assert (tmp_path / "pruned" / "report.html").is_file() and "plugin" not in result.output
    masks = tmp_path / "pruned" / MASKS_FILE
    passed(invoke("apply", dense(name), "--masks", masks, "-o", tmp_path / "again"))
    assert read_checkpoint(tmp_path / "again").layers == checkpoint.layers
    assert passed(invoke("inspect", tmp_path / "pruned")).output.count("removed") > 2
    first, second = weights(tmp_path / "pruned"), weights(tmp_path / "again")
    assert all(torch.equal(first[key], second[key]) for key in first)  # only masks were trained
    dry = ["--sparsity", "0.3", "--dry-run", "--on", "h100-80gb", "--seq-len", "16", "-o", tmp_path / "none"]
    planned = passed(invoke("prune", dense(name), *dry)).output
    assert "not pruned: " in planned and "% of the prunable parameters = " in planned and "auto takes" in planned


def test_mlps_alone_of_a_family_with_head_pruning(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    result = passed(prune(tiny_model, tiny_text, tmp_path / "pruned", "--prune", "mlp"))
    assert "not pruned: attention" in result.output
    checkpoint = read_checkpoint(tmp_path / "pruned")
    assert {layer.query_heads_per_kv_head for layer in checkpoint.layers} == {(2, 2, 2, 2)}
    assert {*read_masks_file(tmp_path / "pruned" / MASKS_FILE)[0]} == {"mlp.gates", "mlp.z", "mlp.saliency"}
    passed(invoke("apply", tiny_model, "--masks", tmp_path / "pruned" / MASKS_FILE, "-o", tmp_path / "again"))
    assert read_checkpoint(tmp_path / "again").layers == checkpoint.layers


REFUSED: dict[str, tuple[str, list[str], int, tuple[str, ...]]] = {  # model, options, code, words
    "experts with biases": ("gpt_oss", [], 3, ("gpt_oss cannot be pruned: its experts have biases",)),
    "attention": ("olmo2", ["--prune", "attention,mlp"], 2, ("attention of olmo2 cannot be pruned", "choose from mlp")),
    "an unknown part": ("olmo2", ["--prune", "heads"], 2, ("'heads'", "attention, mlp, experts")),
    "a speedup": ("olmo2", ["--speedup", "1.2"], 2, ("give a sparsity",)),
    "whole experts": (
        "glm4_moe",
        ["--whole-experts"],
        2,
        ("whole experts of glm4_moe cannot leave the router", "leave --whole-experts out"),
    ),
    "the KV cache": ("olmo2", ["--budget", "kv-bytes"], 2, ("does not depend on what is pruned here",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, dense: Callable[[str], Path], tiny_text: Path, tmp_path: Path) -> None:
    name, options, code, words = REFUSED[case]
    size = [] if "--speedup" in options else ["--sparsity", "0.3"]
    command = ["prune", dense(name), *size, "--data", tiny_text, "-o", tmp_path / "out"]
    result = invoke(*command, "--seq-len", "16", *options)
    assert result.exit_code == code and all(word in result.stderr for word in words), result.stderr
    assert result.stderr.splitlines()[-1].startswith("ddp-vllm: ")


def test_a_folder_that_is_pruned_already(dense: Callable[[str], Path], tmp_path: Path) -> None:
    folder = export_whole(open_source(str(dense("olmo2"))), tmp_path / "pruned")
    with pytest.raises(ModelError, match="pruned already"):
        open_source(str(folder))


def test_an_output_head_that_is_unknown(dense: Callable[[str], Path]) -> None:
    """Cohere scales its logits; a scale that the loss does not know would train on another loss."""
    source = open_source(str(dense("cohere2")))
    model = load_model(source, "float32")
    check_head(source, model)
    model.config.logit_scale = 1.0
    model.logit_scale = 0.5
    with pytest.raises(ModelError, match="Cohere2ForCausalLM computes its logits"):
        check_head(source, model)


def test_a_trained_weight_that_is_not_written() -> None:
    """If transformers and the publisher named a weight differently, its dense values would be written."""
    updated = UpdatedWeights({"a.weight": torch.ones(2), "b.weight": torch.ones(2)}, {}, torch.float32)
    assert torch.equal(updated("a.weight", torch.zeros(2)), torch.ones(2))
    assert torch.equal(updated("c.weight", torch.zeros(2)), torch.zeros(2))
    with pytest.raises(TrainingError, match=r"b\.weight was trained but is not on disk"):
        updated.check_complete()


def test_an_mlp_of_another_form_is_left_alone(dense: Callable[[str], Path], tmp_path: Path) -> None:
    """A folder states one form for all layers, so layers of another width stay as they are."""
    from ddp_prune.models.structure import find_structure

    settings = {"head_dim": 32, "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 16}
    shared = {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    tiny_config("Gemma4TextConfig", **settings, **shared, use_double_wide_mlp=True).save_pretrained(tmp_path)
    shapes = {name: list(tensor.shape) for name, tensor in weights(dense("gemma4_text")).items()}
    found = find_structure(tmp_path, shapes)
    assert [layer.intermediate_size for layer in found.widths.layers] == [96, 96, None]
    assert found.widths.mlp == Block(inputs=PLAIN[:2], output=PLAIN[2], intermediate_size=96)
    assert "layers 2, where no MLP or experts of that form were recognized" in found.left_alone


LEFT_ALONE = {  # config -> the layers whose MLPs are pruned, and what is left as it is
    "Ernie4_5_VLMoeConfig": ([0], ["routed experts, whose form is not known", "shared experts"]),  # two expert lists
    "Step3p7Config": ([0, 1, 2], ["routed experts, whose form is not known", "shared experts"]),
    "BambaConfig": ([*range(32)], []),  # Mamba's tensors are no experts
    "RecurrentGemmaConfig": ([*range(26)], []),  # nor are those of a linear recurrence
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_shared_experts_are_left_alone_and_dense_layers_are_pruned(name: str, tmp_path: Path) -> None:
    structure: Any = open_source(str(write_headers(name, tmp_path))).structure
    layers, rest = LEFT_ALONE[name]
    assert [index for index, row in enumerate(structure.widths.layers) if row.intermediate_size] == layers
    assert list(structure.left_alone[1 : 1 + len(rest)]) == rest
    assert any("expert" in line for line in structure.left_alone) == bool(rest)


UNKNOWN = {  # config -> why none of its parts can be pruned
    "T5Gemma2Config": "T5Gemma2ForConditionalGeneration is an encoder-decoder",
    "UdopConfig": "UdopForConditionalGeneration is an encoder-decoder",
    "Pix2StructConfig": "Pix2StructForConditionalGeneration is an encoder-decoder",
    "Blip2Config": "Blip2ForConditionalGeneration is an encoder-decoder",
    "ZambaConfig": "MLPs that several layers share are left as they are",
    "ZayaConfig": "experts of different widths require one tensor per expert; prune another model",
    "GraniteMoeHybridConfig": "experts of different widths require one tensor per expert; prune another model",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_architectures_that_are_refused_by_their_headers(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=UNKNOWN[name]):
        open_source(str(write_headers(name, tmp_path)))


def test_a_model_that_cannot_generate_is_pruned_without_answers(
    dense: Callable[[str], Path], tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As xLSTM, for which transformers makes a cache of another kind."""
    monkeypatch.setattr(GenerationMixin, "generate", lambda *_, **__: {}["xlstm_cache"])
    output = passed(prune(dense("olmo2"), tiny_text, tmp_path / "pruned")).output
    words = "the report will lack answers of the {} model, which cannot generate (KeyError: 'xlstm_cache')"
    assert words.format("dense") in output and words.format("pruned") in output
    assert PROMPTS[0] not in (tmp_path / "pruned" / "report.html").read_text()
    assert "held-out" in passed(invoke("inspect", tmp_path / "pruned")).output


@pytest.mark.nightly
@pytest.mark.parametrize("train", ["weights", "lora"])
@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
def test_recovery(
    name: str, train: str, dense: Callable[[str], Path], tiny_text: Path, tmp_path: Path, no_pictures: None
) -> None:
    """Also of experts, which are modules of their own in a pruned model; everything that is not trained is copied."""
    passed(prune(dense(name), tiny_text, tmp_path / "pruned"))
    short = ["--data", tiny_text, "--batch-size", "2", "--seq-len", "16", "--heldout-blocks", "2", "--train", train]
    passed(recover(tmp_path / "pruned", tmp_path / "recovered", *map(str, short)))
    before, after = read_checkpoint(tmp_path / "pruned"), read_checkpoint(tmp_path / "recovered")
    assert after.layers == before.layers and after.config == before.config
    first, second = weights(tmp_path / "pruned"), weights(tmp_path / "recovered")
    changed = {key for key in first if not torch.equal(first[key], second[key])}
    kinds = {key.rpartition(".layers.")[2].partition(".")[2] for key in changed}
    assert {"mlp.up_proj.weight", "self_attn.o_proj.weight"} <= kinds and not any("visual" in key for key in changed)
    assert name != "glm4_moe" or train != "weights" or any("experts.0." in kind for kind in kinds)


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["Olmo2Config", "Glm4Config", "Gemma4Config", "Qwen3_5Config", "Ernie4_5_MoeConfig"])
def test_a_dry_run_reads_headers_only(config: str, tmp_path: Path) -> None:
    """Of models in the sizes of transformers' defaults, which are those of a published model."""
    folder = write_headers(config, tmp_path / "dense")
    (folder / "tokenizer.json").write_text("{}")
    on = ["--dry-run", "--on", "8xh200-141gb", "-o", tmp_path / "none"]
    lines = passed(invoke("prune", folder, "--sparsity", "0.25", *on)).output.splitlines()
    assert (
        lines[0].startswith("not pruned: attention") and "(75.0%)" in lines[1] and "25.0% of the prunable" in lines[2]
    )
