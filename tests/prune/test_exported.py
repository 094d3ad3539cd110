"""Masked = narrow = exported, for every family, form of prunable part and unit; what a folder then states."""

import itertools
import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import seams
import torch
from any_models import EXPERT, MIXTURES, MODELS, NUM_EXPERTS, UNSERVED, stack_experts
from commands import assert_refused, cases, invoke, passed
from family_cases import CASES, write_random
from runs import edit_json, edit_weights, prune, same_weights, weights
from seams import Masks, NarrowLayers, cut, gated, gates_module, load_model, logits, open_source, random_gates
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ddp_vllm.checkpoint import read_config
from ddp_vllm.dimensions import widths_of
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_facts import is_pruned
from ddp_vllm.pages.report import draw
from ddp_vllm.pages.summary import footprint, units

BY_DAY = ("llama", "qwen2", "granite", "gemma2", "phi3")  # biases, scales, norms around blocks, fused projections
TOKENS = torch.randint(1, 96, (2, 17), generator=torch.Generator().manual_seed(0))


def read_again(folder: Path) -> Any:
    """Load a pruned folder as transformers without ddp-vllm does, by the file in the folder."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with_pictures = type(config) in AutoModelForImageTextToText._model_mapping
    kind = AutoModelForImageTextToText if with_pictures else AutoModelForCausalLM
    return kind.from_pretrained(folder, config=config, trust_remote_code=True, dtype=torch.float32).eval()


def learned(model: seams.GatedModel, gates: Masks, narrow: NarrowLayers | None) -> tuple[torch.Tensor, Masks, Masks]:
    """Return logits, and the gradients of the gates and their squares."""
    leaves = {kind: value.clone().requires_grad_() for kind, value in gates.items()}
    squares = {kind: torch.zeros_like(value) for kind, value in gates.items()}
    with model.masks(leaves, squares, narrow):
        found = model.model(TOKENS).logits
        found.logsumexp(-1).sum().backward()
    return found.detach(), {kind: leaf.grad for kind, leaf in leaves.items() if leaf.grad is not None}, squares


@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
@pytest.mark.parametrize("family", cases(CASES, BY_DAY))
def test_masked_equals_narrow_equals_exported(
    family: str, head_unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer loses its attention, another its MLP; closed heads and channels are not computed."""
    monkeypatch.setattr(gates_module, "CHANNEL_BLOCK", 8)
    source = open_source(str(write_random(CASES[family], tmp_path / "dense")))
    model, gates = gated(source, head_unit), random_gates(source, head_unit, kept=1.0)
    gates["mlp"] *= torch.rand(4, 72) < torch.tensor([0.3, 0.6, 0.0, 1.0])[:, None]
    kv_heads = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    unit = gates["attn"].shape[1] // 4
    gates["attn"] *= kv_heads.repeat_interleave(unit, 1)
    narrow = NarrowLayers(model)
    narrow.follow({kind: value > 0 for kind, value in gates.items()})
    computed = {kind: [None if kept is None else len(kept) for kept in narrow.kept[kind]] for kind in gates}
    counts = (gates["mlp"] > 0).sum(1).tolist()
    assert computed["mlp"] == [*(-(-count // 8) * 8 for count in counts[:2]), 8, None]
    assert computed["attn"] == ([None] * 4 if family == "phi3" else [2 * unit, unit, 3 * unit, None])
    masked, narrowed = learned(model, gates, None), learned(model, gates, narrow)
    torch.testing.assert_close(narrowed[0], masked[0], atol=2e-5, rtol=0)
    for part, (kind, value) in itertools.product((1, 2), gates.items()):
        one, other = masked[part][kind][value > 0], narrowed[part][kind][value > 0]  # type: ignore[index]
        torch.testing.assert_close(other, one, atol=1e-4 * float(one.abs().max()), rtol=1e-3)
    assert not narrowed[1]["mlp"][2, 8:].any() and masked[1]["mlp"][2, 8:].any()  # really not computed
    narrow.follow({kind: torch.ones_like(value, dtype=torch.bool) for kind, value in gates.items()})
    assert not any(kept is not None for kind in gates for kept in narrow.kept[kind])  # all are computed again

    gates["attn"][3, :unit], gates["attn"][3, -1] = 0.0, 0.0  # with query heads, uneven groups
    with model.masks(gates):
        expected = logits(model.model, TOKENS)
    checkpoint = cut(source, gates, tmp_path / "pruned", head_unit)
    torch.testing.assert_close(logits(read_again(tmp_path / "pruned"), TOKENS), expected, atol=2e-5, rtol=0)
    assert (expected - logits(model.model, TOKENS)).abs().max() > 0.1  # the masks do something
    left = {label: num_left for label, _, num_left in units(checkpoint)}
    heads = gates["attn"].repeat_interleave(2 // unit, 1) > 0
    assert left["query heads"] == int(heads.sum()) and left["MLP channels"] == int((gates["mlp"] > 0).sum())
    assert left["KV heads"] == int(heads.unflatten(1, (4, 2)).any(-1).sum())
    num_dense = model.model.num_parameters()  # type: ignore[operator]
    assert sum(map(prod, checkpoint.dense_shapes.values())) == num_dense
    leftover = ("layers.1.self_attn.", "layers.1.input_layernorm.", "layers.2.mlp.", "layers.2.pre_feedforward")
    assert not [name for name in checkpoint.shapes if any(part in name for part in leftover)]


SCALED: dict[str, dict[str, Any]] = {  # kind of scaled positions -> what it states besides its base
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0
    },
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 16},
    "proportional": {"factor": 4.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
PHI3 = {"dynamic", "linear", "llama3", "proportional", "yarn"}  # which its own class refuses


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=[pytest.mark.nightly] * (family not in ("gemma3_text", "phi3")))
        for family, kind in itertools.product(CASES, SCALED)
        if family != "phi3" or kind not in PHI3
    ],
)
def test_scaled_positions_are_those_of_the_dense_model(family: str, kind: str, tmp_path: Path) -> None:
    """Gemma-3 has them by the type of a layer, for which transformers asks the config of the pruned model."""
    config = CASES[family]
    dim = getattr(config, "head_dim", None) or 8
    factors = {
        "short_factor": [1 + i / 10 for i in range(dim // 2)],
        "long_factor": [2 + i / 5 for i in range(dim // 2)],
    }
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    scaled = plain | SCALED[kind] | {"rope_type": kind} | (factors if kind == "longrope" else {})
    by_layer = {"full_attention": scaled, "sliding_attention": plain}
    changes = {"rope_parameters": by_layer if family == "gemma3_text" else scaled, "max_position_embeddings": 64}
    if family == "phi3":
        changes["original_max_position_embeddings"] = 16
    source = open_source(str(write_random(config, tmp_path / "dense", **changes)))
    model, gates = gated(source, "kv-group"), random_gates(source, "kv-group")
    tokens = torch.randint(1, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    with model.masks(gates):
        expected = logits(model.model, tokens)
    cut(source, gates, tmp_path / "pruned", "kv-group")
    torch.testing.assert_close(logits(read_again(tmp_path / "pruned"), tokens), expected, atol=5e-5, rtol=0)


PLAIN = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXPERTS = tuple(name.replace("mlp.", "mlp.experts.{}.") for name in PLAIN)
BLOCK_SPARSE = tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))
MLP = {  # model -> the module of its layers on disk, the projections of its MLPs
    **dict.fromkeys(("olmo2", "olmo3", "gemma4_text", "hunyuan_v1_dense", "cohere2"), ("model.layers", PLAIN)),
    "falcon_h1": ("model.layers", tuple(name.replace("mlp", "feed_forward") for name in PLAIN)),
    "glm4": ("model.layers", ("mlp.gate_up_proj", "mlp.down_proj")),
    "gemma4": ("model.language_model.layers", PLAIN),
    "gemma4_moe": ("model.layers", PLAIN),  # its experts are left alone
    "granitemoehybrid": ("model.layers", ("shared_mlp.input_linear", "shared_mlp.output_linear")),
    "starcoder2": ("model.layers", ("mlp.c_fc", "mlp.c_proj")),
    "phi": ("model.layers", ("mlp.fc1", "mlp.fc2")),
    "gpt_neox": ("gpt_neox.layers", ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")),
    "qwen3_5": ("model.language_model.layers", PLAIN),
    "mistral3": ("language_model.model.layers", PLAIN),
}
ROUTED = {  # mixture of experts -> the same of one expert
    **dict.fromkeys(
        ("qwen3_next", "glm4_moe", "deepseek_v3", "ernie4_5_moe", "exaone_moe", "hunyuan_v1_moe", "qwen3_moe",
         "qwen2_moe", "olmoe", "deepseek", "deepseek_v2"), ("model.layers", EXPERTS)),
    "qwen3_5_moe": ("model.language_model.layers", EXPERTS),
    "minimax_m2": ("model.layers", BLOCK_SPARSE),
    "mixtral": ("model.layers", BLOCK_SPARSE),
}  # fmt: skip
FAST = ("falcon_h1", "olmo2", "glm4", "starcoder2", "qwen3_5", "glm4_moe", "mixtral", "deepseek")


def holed_gates(source: seams.Source) -> Masks:
    """Four of ten units are removed, the MLP of the first row and one expert whole."""
    gates = random_gates(source)
    if "mlp" in gates:
        gates["mlp"][0] = 0.0
    if "experts" in gates:
        gates["experts"][0, 1] = 0.0
    return gates


def test_every_model_has_a_case() -> None:
    assert {*MLP, *ROUTED} == {*MODELS, *UNSERVED} - {"gpt_oss"}


@pytest.mark.parametrize("name", cases({**MLP, **ROUTED}, FAST))
def test_an_architecture_without_a_row_in_families(
    name: str, dense: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are found by a trial. Masked equals narrow equals what transformers reads from the folder."""
    monkeypatch.setattr(gates_module, "CHANNEL_BLOCK", 8)
    source = open_source(str(dense(name)))
    exact = torch.float32 if name == "gemma4_moe" else torch.float64  # torch.grouped_mm has no float64
    assert source.structure
    stated = source.structure.widths
    layers, projections = (MLP | ROUTED)[name]
    block: Any = stated.to_json()["experts" if name in ROUTED else "mlp"]
    assert (stated.layers_module, (*block["inputs"], block["output"])) == (layers, projections)
    assert source.sizes.blocks == (("experts",) if name in ROUTED else ("mlp",))
    source = source.with_blocks(source.prunable)  # of some mixtures the MLPs of the first layers too
    gates, model, tokens = holed_gates(source), gated(source), torch.arange(5, 37)[None]
    seams.check_head(source, model.model)
    whole = logits(model.model, tokens)
    with model.masks(gates):
        masked = logits(model.model.to(exact), tokens)
    assert (masked - whole).abs().max() > 0.05 * whole.abs().max()  # the masks do something
    if name in MLP:
        narrow = NarrowLayers(model)
        narrow.follow({kind: values > 0 for kind, values in gates.items()})
        assert [None if kept is None else len(kept) % 8 for kept in narrow.kept["mlp"]] == [0, 0, 0]
        with model.masks(gates, None, narrow):
            torch.testing.assert_close(logits(model.model, tokens), masked, atol=2e-5, rtol=0)
    checkpoint = cut(source, gates, tmp_path / "pruned")
    again = logits(read_again(tmp_path / "pruned").to(exact), tokens)
    torch.testing.assert_close(again, masked, atol=5e-6, rtol=0)
    config, stock = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "pruned", dense(name)))
    assert {key: config[key] for key in stock} == stock
    assert set(config) - set(stock) == {"auto_map", "ddp_widths", "quantization_config"}
    num_cut = sum(int((values == 0).sum()) for values in gates.values()) - ("mlp" in gates)  # an MLP keeps a channel
    rows = 3 if len(block["inputs"]) == 2 or "fused" in block else 2
    num_dense = sum(tensor.numel() for tensor in weights(dense(name)).values())
    if not any(each.endswith("bias") for each in checkpoint.shapes if ".mlp." in each):
        assert num_dense - checkpoint.num_parameters == num_cut * rows * source.sizes.hidden_size
        assert num_dense == sum(map(prod, checkpoint.dense_shapes.values()))


def test_everything_else_is_copied(dense: Callable[[str], Path], tmp_path: Path) -> None:
    """Byte for byte: attention, towers of other modalities, and heads that predict further tokens."""
    folder = shutil.copytree(dense("qwen3_5"), tmp_path / "dense")
    edit_weights(folder, lambda tensors: tensors.update({"mtp.layers.0.mlp.up_proj.weight": torch.rand(96, 64)}))
    source, lines = open_source(str(folder)), list[str]()
    source.describe_rest(lines.append)
    assert lines == [
        "not pruned: attention and other token mixers, heads that predict further tokens, towers of other modalities"
    ]
    cut(source, holed_gates(source), tmp_path / "pruned")
    before, after = weights(folder), weights(tmp_path / "pruned")
    changed = {name for name in before if name not in after or not torch.equal(before[name], after[name])}
    assert changed == {f"model.language_model.layers.{i}.{name}.weight" for i in range(3) for name in PLAIN}


@pytest.mark.parametrize("train", ["", pytest.param("weights", marks=pytest.mark.nightly)])
def test_experts_that_are_stacked_on_disk(
    train: str, dense: Callable[[str], Path], tiny_text: Path, tmp_path: Path, no_pictures: None
) -> None:
    """As the publisher stores Qwen3.5: they are written one by one, because their widths differ."""
    folder = shutil.copytree(dense("qwen3_5_moe"), tmp_path / "dense")
    stack_experts(folder)
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in weights(folder)
    for model, output in ((dense("qwen3_5_moe"), tmp_path / "of-single"), (folder, tmp_path / "of-stacked")):
        if train:
            passed(prune(model, tiny_text, output, "--train", train))
        else:
            source = open_source(str(model))
            cut(source, holed_gates(source), output)
    assert same_weights(tmp_path / "of-single", tmp_path / "of-stacked")


@pytest.mark.parametrize("family", MIXTURES)
def test_a_config_alone_describes_what_is_found_in_the_model(family: str, dense: Callable[[str], Path]) -> None:
    """Latency profiles, whole experts and convert have no more than the config."""
    folder = dense(family)
    structure = open_source(str(folder)).structure
    by_config = widths_of(read_config(folder))
    assert structure and structure.widths.to_json()["experts"] == by_config.to_json()["experts"]
    sizes = [[layer.expert_intermediate_sizes for layer in widths.layers] for widths in (structure.widths, by_config)]
    assert sizes[0] == sizes[1] and any(sizes[0])


def test_a_layer_may_lose_all_its_experts(dense: Callable[[str], Path], tmp_path: Path) -> None:
    """What is left of the block is its shared expert; the card says that fewer are left than a token is sent to."""
    source = open_source(str(dense("qwen2_moe")))
    gates, model = random_gates(source), gated(source)
    gates["experts"][1] = 0.0
    gates["experts"][2, 2:] = 0.0
    for expert, width in enumerate((0, 1, 2, 5, 17, EXPERT, 16, 15)):  # none, one, odd, above and below a block of 16
        gates["experts"][0, expert] = 1.0
        gates["experts"][0, expert, width:] = 0.0
    cut(source, gates, tmp_path / "out")
    with model.masks(gates):
        masked = logits(model.model, TOKENS)
    torch.testing.assert_close(logits(read_again(tmp_path / "out"), TOKENS), masked, atol=2e-5, rtol=0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| 1 | – | – | 0% |" in card and "| 2 | 2 | 74 | 14% |" in card


def test_a_published_deepseek_config_loads_without_its_code(dense: Callable[[str], Path], tmp_path: Path) -> None:
    """DeepSeekMoE-16B's config.json names Python files that we neither download nor run."""
    folder = Path(shutil.copytree(dense("deepseek"), tmp_path / "dense"))
    left_out = ("rope_parameters", "head_dim", "mlp_bias", "transformers_version", "dtype")
    edit_json(folder / "config.json", **dict.fromkeys(left_out))
    code = {"AutoConfig": "configuration_deepseek.Config", "AutoModelForCausalLM": "modeling_deepseek.Model"}
    edit_json(
        folder / "config.json", architectures=["DeepseekForCausalLM"], auto_map=code, aux_loss_alpha=0.001,
        rope_scaling=None, rope_theta=10000, scoring_func="softmax", seq_aux=True, torch_dtype="float32",
        pretraining_tp=1,
    )  # fmt: skip
    source = open_source(str(folder))
    plain = load_model(open_source(str(dense("deepseek"))), "auto")
    assert torch.equal(logits(load_model(source, "auto"), TOKENS), logits(plain, TOKENS))
    cut(source, random_gates(source), tmp_path / "out")
    model = gated(source)
    with model.masks(random_gates(source)):
        masked = logits(model.model, TOKENS)
    torch.testing.assert_close(logits(read_again(tmp_path / "out"), TOKENS), masked, atol=2e-5, rtol=0)


KEPT = 5  # whole experts of 8, of which a token is sent to 3
STOCK = ("mixtral", "deepseek_v2", "qwen3_moe", "olmoe", "qwen2_moe")


def whole_gates(num_layers: int) -> Masks:
    """Random scales of channels; other experts stay in each layer."""
    generator = torch.Generator().manual_seed(1)
    gates = torch.rand(num_layers, NUM_EXPERTS, EXPERT, generator=generator) + 0.5
    for row in gates:
        row[torch.randperm(NUM_EXPERTS, generator=generator)[KEPT:]] = 0.0
    return {"experts": gates}


def route_by_hand(model: Any, open_LE: torch.Tensor) -> None:
    """Give each router of a stock model −∞ for the closed experts, before its softmax."""
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for router, open_E in zip(routers, open_LE, strict=True):

        def route(x: torch.Tensor, router: Any = router, open_E: torch.Tensor = open_E) -> tuple[torch.Tensor, ...]:
            scores = torch.nn.functional.linear(x.flatten(0, -2), router.weight).masked_fill(~open_E, -torch.inf)
            shares, ids = scores.softmax(-1).topk(router.top_k)
            if getattr(router, "norm_topk_prob", model.config.model_type == "mixtral"):
                shares = shares / shares.sum(-1, keepdim=True)
            return scores, shares * getattr(router, "routed_scaling_factor", 1.0), ids

        router.forward = route


@pytest.mark.parametrize("family", cases(STOCK, STOCK[:2]))
def test_whole_experts_leave_a_stock_checkpoint_that_equals_the_dense_model_routed_by_hand(
    family: str, dense: Callable[[str], Path], tmp_path: Path
) -> None:
    source = open_source(str(dense(family)))
    checkpoint = cut(source, whole_gates(len(source.sizes.routed_layers)), tmp_path / "out", "expert")
    gates, _ = seams.read_masks(tmp_path / "out" / MASKS_FILE)
    by_hand: Any = AutoModelForCausalLM.from_pretrained(source.folder).eval()
    routed = [layer.mlp.experts for layer in by_hand.model.layers if hasattr(layer.mlp, "experts")]
    for experts, gates_EC in zip(routed, gates["experts"], strict=True):
        experts.down_proj.data.mul_(gates_EC[:, None])
    unrouted = logits(by_hand, TOKENS)
    route_by_hand(by_hand, (gates["experts"] > 0).any(-1))
    expected, model = logits(by_hand, TOKENS), gated(source, "expert")
    before = logits(model.model, TOKENS)
    with model.masks(gates):
        masked = logits(model.model, TOKENS)
    torch.testing.assert_close(logits(model.model, TOKENS), before)  # routers are whole again
    assert (expected - unrouted).abs().max() > 0.05  # that closed experts are not chosen matters
    torch.testing.assert_close(masked, expected, atol=2e-5, rtol=0)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # a class of transformers, no code of the folder
    torch.testing.assert_close(logits(read, TOKENS), expected, atol=2e-5, rtol=0)
    assert type(read) is type(by_hand) and not list((tmp_path / "out").glob("*.py"))

    config, stock = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", dense(family)))
    assert list(stock) == [key for key in config if key != "ddp_widths"]
    (number,) = {key for key in stock if config[key] != stock[key]}
    assert config[number] == KEPT and config["ddp_widths"]["experts"]["num_experts"] == stock[number] == NUM_EXPERTS
    assert is_pruned(tmp_path / "out") and not is_pruned(dense(family))
    layers = [row for layer in checkpoint.layers if (row := layer.expert_intermediate_sizes)]
    assert layers == [tuple(row) for row in (gates["experts"] > 0).sum(-1).tolist()]
    assert units(checkpoint)[0] == ("experts", len(layers) * NUM_EXPERTS, len(layers) * KEPT)
    assert sum(map(prod, checkpoint.dense_shapes.values())) == by_hand.num_parameters()
    _, flops = footprint(checkpoint)
    _, num_dense, num_left = units(checkpoint)[0]  # a token is sent to as many experts as before, by fewer router rows
    assert flops[1] - flops[2] == 2 * source.sizes.hidden_size * (num_dense - num_left)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "stock checkpoint with fewer experts" in card and "trust" not in card
    assert "experts" in [picture.name for picture in draw(checkpoint)]
    for words, said in (
        (["quantize", "--scheme", "FP8_DYNAMIC"], f"is a stock {family} checkpoint, so let vLLM quantize it"),
        (["export"], f"is a stock {family} checkpoint, which llama.cpp's own convert_hf_to_gguf.py converts"),
    ):
        for folder in (tmp_path / "out", dense(family)):
            result = invoke(words[0], folder, *words[1:], "-o", tmp_path / "none")
            assert_refused(result, result.exit_code, said)
