"""Convert for stock classes: narrower MLPs and experts are found by shapes, and every tensor is compared with
transformers' class, which says what it is. What such folders compute is tested in test_stock_classes.py.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_families import load
from any_models import GEMMA, MODELS, UNSERVED, tiny_config, write_model
from commands import assert_refused, cases, invoke, passed
from runs import edit_config, edit_weights
from safetensors.torch import load_file
from serving import PROMPTS

from ddp_vllm.checkpoint import read_checkpoint, read_config
from ddp_vllm.model_facts import describe_model
from ddp_vllm.remote_code.configuration_ddp_widths import register_widths

WIDE = {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
DERIVED: dict[str, Callable[[], Any]] = {  # the class derives the width from config.json, or has two
    "lfm2": lambda: tiny_config(
        "Lfm2Config", layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=True,
        block_multiple_of=32,
    ),
    "gemma4_wide": lambda: tiny_config(
        "Gemma4TextConfig", GEMMA, WIDE, pad_token_id=0, use_double_wide_mlp=True
    ),
    "phimoe": lambda: tiny_config("PhimoeConfig", num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip
# fused, without a gate, with a dense layer or shared experts, with other names, in a wrapper
BY_DAY = ("olmo2", "glm4", "starcoder2", "falcon_h1", "qwen3_5", "glm4_moe", "qwen3_moe", "mixtral", "deepseek")
Edit = Callable[[dict[str, torch.Tensor]], Any]


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a dense model of a family once."""
    root = tmp_path_factory.mktemp("dense")

    def write(family: str) -> Path:
        if not (root / family).exists():
            with pytest.MonkeyPatch.context() as patch:
                for name, config in DERIVED.items():
                    patch.setitem(UNSERVED, name, config)
                write_model(family, root / family)
        return root / family

    return write


def cut(*parts: str, to: int, axis: int | None = None, where: str = "") -> Edit:
    """Return a change that shortens tensors: those of `parts` along axis 0, but outputs along axis 1."""

    def edit(weights: dict[str, torch.Tensor]) -> None:
        names = [name for name in weights if any(part in name for part in parts) and where in name]
        assert names
        for name in names:
            is_output = any(part in name for part in ("down_proj", "c_proj", ".w2.", "o_proj"))
            if not (is_output and name.endswith("bias")):
                weights[name] = weights[name].narrow(axis if axis is not None else int(is_output), 0, to).contiguous()

    return edit


def drop(*parts: str) -> Edit:
    return lambda weights: [weights.pop(name) for name in [*weights] if any(part in name for part in parts)]


def zeroed(dense_model: Path, edit: Edit) -> Any:
    """Return the dense model with zeros where `edit` cuts; no code of ours makes it."""
    model = load(dense_model)
    whole = load_file(dense_model / "model.safetensors")
    short = dict(whole)
    edit(short)
    for name in whole:
        if short[name].shape != whole[name].shape:
            padded = torch.zeros_like(whole[name])
            padded[tuple(slice(0, size) for size in short[name].shape)] = short[name]
            whole[name] = padded
    return type(model).from_pretrained(None, config=model.config, state_dict=whole).eval()


@pytest.mark.parametrize("family", cases(MODELS, BY_DAY))
def test_the_widths_are_those_that_were_cut(family: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made(family) / "narrow", tmp_path / "tool"))
    edit_config(folder, quantization_config=None)
    passed(invoke("convert", folder, "-o", tmp_path / "out"))
    places = made(family) / "narrow", tmp_path / "out"
    stated, written = (read_config(place)["quantization_config"] for place in places)
    if family == "qwen3_moe":  # its one MLP is as wide as before
        del stated["mlp"], stated["layers"][1]["intermediate_size"]
    assert written == stated
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    checkpoint = read_checkpoint(tmp_path / "out")
    assert checkpoint.provenance["converted"] == {"from": "tool", "format": "tensors"} and 0 < checkpoint.removed < 1


REFUSED: dict[str, tuple[str, Edit | dict[str, Any], tuple[str, ...]]] = {  # family, change, words
    "a norm": ("olmo2", drop("1.post_feedforward_layernorm"), ("1.post_feedforward_layernorm.weight of shape [64]",)),
    "an untied head": ("olmo2", drop("lm_head"), ("lm_head.weight of shape [320, 64] is missing", "Olmo2ForCausalLM")),
    "the hidden size": ("olmo2", {"hidden_size": 128}, ("[320, 64], but Olmo2ForCausalLM has [320, 128]", "--dense")),
    "a bias too many": (
        "olmo2", lambda weights: weights.update({"model.layers.1.mlp.down_proj.bias": torch.ones(64)}),
        ("mlp.down_proj.bias' of shape [64] is none that Olmo2ForCausalLM has", "without adding tensors"),
    ),
    "shared experts and a dense layer": (
        "glm4_moe", lambda weights: (cut("0.mlp.", to=50)(weights), cut("shared_experts", to=40)(weights)),
        ("mlp.down_proj of 96 channels and mlp.shared_experts.down_proj of 64 channels are narrower",),
    ),
    "an expert too many": (
        "qwen3_moe", {"num_experts": 6, "num_local_experts": 6}, ("experts.6.", "is none that Qwen3MoeForCausalLM has"),
    ),
    "no expert of a layer": ("qwen3_moe", drop("2.mlp.experts"), ("2.mlp.experts.0.down_proj.weight of shape",)),
    "both widths of Gemma 4": (
        "gemma4_wide", lambda weights: (cut("0.mlp.", to=50)(weights), cut("2.mlp.", to=50)(weights)),
        ("mlp.down_proj of 192 channels and mlp.down_proj of 96 channels",),
    ),
    "a derived width that grew": (
        "lfm2", {"intermediate_size": 48, "block_ff_dim": 48}, ("64 channels on disk and 32 by config.json", "--dense"),
    ),
    "dropped blocks": ("olmo2", {"drop_mlp_list": [1]}, ("drop_mlp_list removes whole blocks",)),
    "as published, two widths": ("gemma4_wide", {}, ("vLLM serves it as it is",)),
    "a narrower attention": ("olmo2", cut("1.self_attn.o_proj", to=32, axis=0), ("only MLPs and experts may be",)),
    "an MLP without its output": (
        "olmo2", drop("1.mlp.down_proj"), ("layers.1.mlp.down_proj.weight of shape [64, 96] is missing",)
    ),
    "an unknown architecture": ("olmo2", {"model_type": "own"}, ("transformers has no class for model_type 'own'",)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_tensor_that_the_class_has_otherwise_is_named(
    case: str, dense: Callable[[str], Path], tmp_path: Path
) -> None:
    family, change, words = REFUSED[case]
    folder = Path(shutil.copytree(dense(family), tmp_path / "folder"))
    if isinstance(change, dict):
        edit_config(folder, **change)
    else:
        edit_weights(folder, change)
    assert_refused(invoke("convert", folder, "-o", tmp_path / "out"), 3, *words)
    assert not (tmp_path / "out").exists()


CUTS: dict[str, tuple[str, Edit, tuple[tuple[int, ...] | int | None, ...]]] = {  # family, change, the middle's widths
    "as wide as the hidden size": ("starcoder2", cut("1.mlp.", to=64), (96, 64, 96)),
    "experts as wide as the hidden size": ("phimoe", cut("experts.0.", "experts.2.", to=64), ((64, 96, 64, 96),) * 3),
    "a width that the class rounds": ("lfm2", cut("1.feed_forward.", to=40), (64, 40, 64)),
    "the narrow kind of Gemma 4": ("gemma4_wide", cut("0.mlp.", to=50), (50, 96, None)),
    "the wide kind of Gemma 4": ("gemma4_wide", cut("2.mlp.", to=50), (None, None, 50)),
    "shared experts": ("glm4_moe", cut("shared_experts", to=40), (None, 40, 40)),
}


@pytest.mark.parametrize("case", CUTS)
def test_roles_are_those_of_the_class(case: str, dense: Callable[[str], Path], tmp_path: Path) -> None:
    family, edit, widths = CUTS[case]
    folder = Path(shutil.copytree(dense(family), tmp_path / "folder"))
    edit_weights(folder, edit)
    passed(invoke("convert", folder, "-o", tmp_path / "out"))
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["layers"]
    expected = [
        {"expert_intermediate_sizes": [*w]} if isinstance(w, tuple) else {"intermediate_size": w} for w in widths
    ]
    assert stated == [{key: value for key, value in entry.items() if value} for entry in expected]
    assert 0 < read_checkpoint(tmp_path / "out").removed < 1
    cached = [describe_model(str(place)).kv_bytes_per_token for place in (tmp_path / "out", dense(family))]
    assert cached[0] == cached[1]
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    assert_refused(invoke("export", tmp_path / "out", "-o", tmp_path / "x.gguf"), 3, f"no graph of {model_type} with")
    assert_refused(invoke("export", folder, "-o", tmp_path / "x.gguf"), 3, f"it is a stock {model_type} checkpoint")
    register_widths()
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        logits = load(tmp_path / "out")(ids).logits
        torch.testing.assert_close(logits, zeroed(dense(family), edit)(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_list_of_widths_is_the_classes_own(dense: Callable[[str], Path], tmp_path: Path) -> None:
    """HunYuan may state one width for each layer."""
    folder = Path(shutil.copytree(dense("hunyuan_v1_moe"), tmp_path / "folder"))
    edit_config(folder, moe_intermediate_size=[64, 64, 64])
    edit_weights(folder, cut("1.mlp.experts.3.", to=40))
    passed(invoke("convert", folder, "-o", tmp_path / "out"))
    layers = read_checkpoint(tmp_path / "out").layers
    assert layers[1].expert_intermediate_sizes == (64, 64, 64, 40, 64, 64, 64, 64)


def test_the_dense_model_gives_the_widths(dense: Callable[[str], Path], tmp_path: Path) -> None:
    """Also where all layers are alike, and config.json has their width."""
    folder = Path(shutil.copytree(dense("olmo2"), tmp_path / "folder"))
    edit_config(folder, intermediate_size=80)
    edit_weights(folder, cut(".mlp.", to=80))
    assert_refused(invoke("convert", folder, "-o", tmp_path / "out"), 3, "vLLM serves it as it is")
    passed(invoke("convert", folder, "-o", tmp_path / "out", "--dense", dense("olmo2")))
    assert [layer.intermediate_size for layer in read_checkpoint(tmp_path / "out").layers] == [80, 80, 80]


SHARED: dict[str, tuple[dict[str, int], Edit, dict[str, Any], dict[str, Any]]] = {
    # family -> its pruned sizes in config.json, change, the widths of shared and of routed experts by --dense
    "qwen2_moe": (
        {"shared_expert_intermediate_size": 40, "moe_intermediate_size": 56},
        lambda weights: (cut(".shared_expert.", to=40)(weights), cut(".experts.", to=56)(weights)),
        {"intermediate_size": 48}, {"intermediate_size": 64, "num_experts": 8},
    ),
    "deepseek_v3": ({"n_shared_experts": 1}, cut("shared_experts", to=64), {"intermediate_size": 128}, {}),
}  # fmt: skip


@pytest.mark.parametrize("family", SHARED)
def test_the_dense_model_gives_the_width_of_shared_experts(
    family: str, dense: Callable[[str], Path], tmp_path: Path
) -> None:
    sizes, edit, shared, routed = SHARED[family]
    folder = Path(shutil.copytree(dense(family), tmp_path / "folder"))
    edit_config(folder, **sizes)
    edit_weights(folder, edit)
    assert_refused(invoke("convert", folder, "-o", tmp_path / "out"), 3, "vLLM serves it as it is")
    passed(invoke("convert", folder, "-o", tmp_path / "out", "--dense", dense(family)))
    stated = read_config(tmp_path / "out")["quantization_config"]
    assert shared.items() <= stated["mlp"].items() and routed.items() <= stated.get("experts", {}).items()
    counts = [sum(t.numel() for t in load_file(p / "model.safetensors").values()) for p in (folder, dense(family))]
    assert read_checkpoint(tmp_path / "out").removed == pytest.approx(1 - counts[0] / counts[1])


def test_a_size_that_only_the_pruned_model_states_is_not_the_dense_ones(
    dense: Callable[[str], Path], tmp_path: Path
) -> None:
    """The class of the dense model derives it."""
    original = Path(shutil.copytree(dense("lfm2"), tmp_path / "dense"))
    folder = Path(shutil.copytree(original, tmp_path / "folder"))
    edit_config(folder, block_ff_dim=48, intermediate_size=48)
    edit_weights(folder, cut(".feed_forward.", to=32))
    passed(invoke("convert", folder, "-o", tmp_path / "out", "--dense", original))
    assert read_config(tmp_path / "out")["quantization_config"]["mlp"]["intermediate_size"] == 64
