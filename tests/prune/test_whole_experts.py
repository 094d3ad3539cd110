"""Whole experts: those that go leave the router too, and what is written is a stock checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import EXPERT, NUM_EXPERTS, write_model
from commands import assert_refused, invoke, passed
from runs import edit_json, heldout_of, prune, recover
from test_experts import TOKENS
from transformers import AutoModelForCausalLM

from ddp_prune.core.gates import GatedModel, Masks
from ddp_prune.core.loss import losses
from ddp_prune.export import apply_masks, export
from ddp_prune.masks_file import read_masks
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import open_source
from ddp_prune.recipe import Recipe
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import SettingError
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_facts import is_pruned
from ddp_vllm.pages.metrics import gather
from ddp_vllm.pages.summary import footprint, removed_parameters, units

KEPT = 5  # of 8, of which a token is sent to 3
STOCK = ("qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "deepseek_v2")


def whole_gates(shape: tuple[int, ...]) -> Masks:
    """Random scales of channels; other experts stay in each layer."""
    generator = torch.Generator().manual_seed(1)
    gates = torch.rand(shape, generator=generator) + 0.5
    for row in gates:
        row[torch.randperm(len(row), generator=generator)[KEPT:]] = 0.0
    return {"experts": gates}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with each dense model and what was made of it."""
    folder = tmp_path_factory.mktemp("whole")
    for family in STOCK:
        source = open_source(str(write_model(family, folder / f"dense-{family}")))
        gates = whole_gates((len(source.sizes.routed_layers), NUM_EXPERTS, EXPERT))
        export(source, gates, folder / family, head_unit="expert", provenance={})
    return folder


def _route_by_hand(model: Any, open_LE: torch.Tensor) -> None:
    """Give each router of a stock model −∞ for the closed experts, before its softmax."""
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for router, open_E in zip(routers, open_LE, strict=True):

        def route(x: torch.Tensor, router: Any = router, open_E: torch.Tensor = open_E) -> tuple[torch.Tensor, ...]:
            logits = torch.nn.functional.linear(x.flatten(0, -2), router.weight).masked_fill(~open_E, -torch.inf)
            shares, ids = logits.softmax(-1).topk(router.top_k)
            if getattr(router, "norm_topk_prob", model.config.model_type == "mixtral"):
                shares = shares / shares.sum(-1, keepdim=True)
            return logits, shares * getattr(router, "routed_scaling_factor", 1.0), ids

        router.forward = route


@pytest.mark.parametrize("family", STOCK)
def test_gated_equals_exported_equals_the_dense_model_routed_by_hand(family: str, made: Path) -> None:
    source = open_source(str(made / f"dense-{family}"))
    gates, _ = read_masks(made / family / MASKS_FILE)
    by_hand: Any = AutoModelForCausalLM.from_pretrained(source.folder).eval()
    routed = [layer.mlp.experts for layer in by_hand.model.layers if hasattr(layer.mlp, "experts")]
    with torch.no_grad():
        for experts, gates_EC in zip(routed, gates["experts"], strict=True):
            experts.down_proj.mul_(gates_EC[:, None])
        unrouted = by_hand(TOKENS).logits
        _route_by_hand(by_hand, (gates["experts"] > 0).any(-1))
        expected = by_hand(TOKENS).logits
        gated = GatedModel(load_model(source, "float32"), source.family, source.sizes, "expert")
        dense = gated.model(TOKENS).logits
        with gated.masks(gates):
            masked = gated.model(TOKENS).logits
        torch.testing.assert_close(gated.model(TOKENS).logits, dense)  # routers are whole again
    assert (expected - unrouted).abs().max() > 0.05  # that closed experts are not chosen matters
    torch.testing.assert_close(masked, expected, atol=2e-5, rtol=0)
    written = AutoModelForCausalLM.from_pretrained(made / family)
    assert type(written) is type(by_hand)  # a class of transformers, which runs no code of the folder
    with torch.no_grad():
        torch.testing.assert_close(written(TOKENS).logits, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", STOCK)
def test_what_is_written_is_a_stock_checkpoint(family: str, made: Path) -> None:
    """Its config is the dense model's but for the number of experts; nothing in the folder is code."""
    before, after = (json.loads((made / name / "config.json").read_text()) for name in (f"dense-{family}", family))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert len(changed) == 1 and after[changed.pop()] == KEPT and list(before) == list(after)
    assert not list((made / family).glob("*.py"))
    checkpoint, dense = read_checkpoint(made / family), load_model(open_source(str(made / f"dense-{family}")), "auto")
    assert is_pruned(made / family) and not is_pruned(made / f"dense-{family}")
    layers = [row for layer in checkpoint.layers if (row := layer.expert_intermediate_sizes)]
    gates, _ = read_masks(made / family / MASKS_FILE)
    assert layers == [tuple(row) for row in (gates["experts"] > 0).sum(-1).tolist()]
    assert units(checkpoint)[0] == ("experts", len(layers) * NUM_EXPERTS, len(layers) * KEPT)
    assert checkpoint.num_parameters + removed_parameters(checkpoint) == dense.num_parameters()  # type: ignore[operator]
    _, flops = footprint(checkpoint)
    assert flops[1] == flops[2]  # a token is sent to as many experts as before
    card = (made / family / "README.md").read_text()
    assert "stock checkpoint with fewer experts" in card and "trust" not in card
    gather(checkpoint)  # for the report


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("quantize", "--scheme", "FP8_DYNAMIC"), "is a stock {} checkpoint, so let vLLM quantize it"),
        (("export",), "is a stock {} checkpoint, which llama.cpp's own convert_hf_to_gguf.py converts"),
    ],
)
@pytest.mark.parametrize("folder", ["olmoe", "dense-mixtral"])
def test_what_a_stock_checkpoint_is_refused_for(
    folder: str, command: tuple[str, ...], said: str, made: Path, tmp_path: Path
) -> None:
    """Its experts are whole and alike, so nothing is said of different widths."""
    result = invoke(*command, made / folder, "-o", tmp_path / "out")
    assert_refused(result, result.exit_code, said.format(folder.removeprefix("dense-")))
    assert result.exit_code in (2, 3) and "different widths" not in result.stderr


def test_a_gone_expert_gets_no_token_and_weights_learn_around_it(made: Path) -> None:
    """Choices are counted under the dense model's numbers, and rows of the router learn where experts are open."""
    source = open_source(str(made / "dense-olmoe"))
    gated = GatedModel(load_model(source, "float32"), source.family, source.sizes, "expert")
    gates = whole_gates(gated.shapes["experts"])
    counts = torch.zeros(gated.shapes["experts"][:2], dtype=torch.int64)
    routers = [gated.model.get_submodule(f"model.layers.{layer}.mlp.gate").weight for layer in range(3)]
    for weight in routers:
        weight.requires_grad_()
    with gated.masks(gates), gated.counting(counts):
        gated.model(TOKENS).logits.square().mean().backward()
    is_open = gates["experts"].any(-1)
    assert not counts[~is_open].any() and counts.sum(1).tolist() == [TOKENS.numel() * 3] * 3
    for weight, open_E in zip(routers, is_open, strict=True):
        assert weight.grad is not None and weight.grad[open_E].any(-1).all() and not weight.grad[~open_E].any()


@pytest.mark.usefixtures("cache", "no_pictures")
@pytest.mark.parametrize("train", ["masks", "weights"])
def test_prune_recover_and_prune_channels_too(train: str, tiny_experts: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Of 5 experts 3 stay in each layer, which is all that either budget allows."""
    more = ["--sparsity", "0.3"] if train == "masks" else ["--sparsity", "0.4", "--budget", "params"]
    result = passed(prune(tiny_experts, tiny_text, tmp_path / "pruned", "--whole-experts", *more, "--train", train))
    assert "budget: keep 3 of 5 whole experts of each layer" in result.stdout
    checkpoint = read_checkpoint(tmp_path / "pruned")
    assert [sum(map(bool, layer.expert_intermediate_sizes or ())) for layer in checkpoint.layers] == [3, 3]
    assert checkpoint.stock and checkpoint.stock["num_local_experts"] == 3
    found = losses(AutoModelForCausalLM.from_pretrained(tmp_path / "pruned"), heldout_of(tiny_experts, tiny_text))
    stated = checkpoint.provenance["perplexity"]["block_losses"]["pruned"]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(stated), atol=5e-5, rtol=0)
    if train == "weights":
        return
    weights = [tmp_path / name / "model.safetensors" for name in ("pruned", "again", "recovered")]
    apply_masks(str(tiny_experts), tmp_path / "pruned" / MASKS_FILE, tmp_path / "again", overwrite=False)
    assert weights[0].read_bytes() == weights[1].read_bytes()
    passed(recover(tmp_path / "pruned", tmp_path / "recovered", "--tokens", "64"))
    assert read_checkpoint(tmp_path / "recovered").stock == checkpoint.stock
    assert weights[2].read_bytes() != weights[0].read_bytes()
    passed(prune(tmp_path / "recovered", tiny_text, tmp_path / "channels", "--sparsity", "0.4"))
    ragged = read_checkpoint(tmp_path / "channels")
    widths = [layer.expert_intermediate_sizes for layer in ragged.layers]
    assert not ragged.stock and [len(row or ()) for row in widths] == [3, 3] and len({*widths[0], *widths[1]}) > 2


def test_too_few_experts_for_a_token_are_refused(tiny_experts: Path, tiny_text: Path, tmp_path: Path) -> None:
    result = prune(tiny_experts, tiny_text, tmp_path / "out", "--whole-experts", sparsity="0.7")
    assert_refused(result, 2, "1 of 5 experts", "keep 2 to 4", "each token to 2")


@pytest.mark.parametrize(
    "changes", [{"controller": "alm"}, {"scope": "expert"}, {"budget": "latency"}, {"align": 16}], ids=str
)
def test_what_whole_experts_cannot_do(changes: dict[str, Any]) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(SettingError, match=f"{name} is {value!r}; with whole_experts it must be"):
        Recipe(model="m", sparsity=0.4, whole_experts=True, **changes)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [("deepseek_v2", {"n_group": 2}, "experts in groups"), ("deepseek", {}, "no stock class in transformers")],
)
def test_models_whose_experts_cannot_go(family: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_model(family, tmp_path / "dense")
    edit_json(tmp_path / "dense" / "config.json", **changes)
    source = open_source(str(tmp_path / "dense"))
    with pytest.raises(SettingError, match=reason):
        export(source, whole_gates((2, 8, EXPERT)), tmp_path / "out", head_unit="expert", provenance={})
