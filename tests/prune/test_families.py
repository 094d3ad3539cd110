"""Every dense family: a random model of the real config class, masked = narrow = exported through remote code."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES
from runs import export_whole, weights
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from ddp_prune.core import gates as gates_module
from ddp_prune.core.gates import GatedModel, NarrowLayers
from ddp_prune.export import export
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import open_source
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import CheckpointError
from ddp_vllm.families import unit_shapes
from ddp_vllm.pages.summary import removed_parameters, units


def _model(model_type: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CASES[model_type])
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # initialized to 0 or 1, where nothing could go wrong
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.5)
    return model


@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
@pytest.mark.parametrize("model_type", CASES)
def test_masked_equals_exported(model_type: str, head_unit: str, tmp_path: Path) -> None:
    _model(model_type).save_pretrained(tmp_path / "dense")
    source = open_source(str(tmp_path / "dense"))
    gates = {
        kind: (torch.rand(shape) + 0.5) * (torch.rand(shape) < 0.7)
        for kind, shape in unit_shapes(source.sizes, head_unit).items()
    }
    gates["attn"][1], gates["mlp"][2] = 0.0, 0.0  # whole blocks
    gates["attn"][3, 0], gates["mlp"][0, :7] = 1.0, 1.0  # none is gone by chance
    export(source, gates, tmp_path / "pruned", head_unit=head_unit, provenance={})
    tokens = torch.randint(1, 96, (2, 17))
    gated = GatedModel(load_model(source, "float32"), source.family, source.sizes, head_unit)
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", trust_remote_code=True).eval()
    with torch.no_grad(), gated.masks(gates):
        masked = gated.model(tokens).logits
        exported = pruned(tokens).logits
    torch.testing.assert_close(exported, masked, atol=2e-5, rtol=0)
    assert (masked - gated.model(tokens).logits).abs().max() > 0.1  # the masks do something
    checkpoint, num_dense = read_checkpoint(tmp_path / "pruned"), gated.model.num_parameters()  # type: ignore[operator]
    left = {label: num_left for label, _, num_left in units(checkpoint)}
    heads = gates["attn"].repeat_interleave(8 // gates["attn"].shape[1], 1) > 0
    assert left["query heads"] == int(heads.sum()) and left["MLP channels"] == int((gates["mlp"] > 0).sum())
    assert left["KV heads"] == int(heads.unflatten(1, (4, 2)).any(-1).sum())
    assert checkpoint.num_parameters + removed_parameters(checkpoint) == num_dense
    leftover = ("layers.1.self_attn.", "layers.1.input_layernorm.", "layers.2.mlp.", "layers.2.pre_feedforward")
    assert not [name for name in checkpoint.shapes if any(part in name for part in leftover)]


@pytest.mark.parametrize("model_type", CASES)
def test_every_tensor_of_another_shape_is_refused(model_type: str, tmp_path: Path) -> None:
    """Before, nobody looked at the norms of queries and keys, and at biases of outputs."""
    _model(model_type).save_pretrained(tmp_path / "dense")
    folder = export_whole(open_source(str(tmp_path / "dense")), tmp_path / "pruned")
    tensors = weights(folder)
    for name, tensor in tensors.items():
        if ".layers." not in name or ".layers.0." in name:
            for wrong in (torch.cat([tensor, tensor[:1]]), tensor[..., None], tensor[..., :-1]):
                save_file({**tensors, name: wrong.contiguous()}, folder / "model.safetensors")
                with pytest.raises(CheckpointError, match=re.escape(name)):
                    read_checkpoint(folder)


@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
@pytest.mark.parametrize("model_type", CASES)
def test_narrow_equals_masked(model_type: str, head_unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, gradients of open gates and their squares, with closed heads and channels not computed."""
    monkeypatch.setattr(gates_module, "CHANNEL_BLOCK", 8)
    _model(model_type).save_pretrained(tmp_path)
    source = open_source(str(tmp_path))
    gated = GatedModel(load_model(source, "float32"), source.family, source.sizes, head_unit)
    gates = {kind: torch.rand(shape) + 0.5 for kind, shape in gated.shapes.items()}
    gates["mlp"] *= torch.rand(gates["mlp"].shape) < torch.tensor([0.0, 0.3, 0.6, 1.0])[:, None]
    heads = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]])  # KV heads
    gates["attn"] *= heads.repeat_interleave(gates["attn"].shape[1] // 4, 1)
    narrow = NarrowLayers(gated)
    narrow.follow({kind: torch.ones(shape, dtype=torch.bool) for kind, shape in gated.shapes.items()})
    assert not any(kept is not None for kind in gates for kept in narrow.kept[kind])
    narrow.follow({kind: value > 0 for kind, value in gates.items()})
    computed = {kind: [None if kept is None else len(kept) for kept in narrow.kept[kind]] for kind in gates}
    assert computed["mlp"] == [8, *((-(-count // 8) * 8) for count in (gates["mlp"] > 0).sum(1)[1:3].tolist()), None]
    unit = gates["attn"].shape[1] // 4
    assert computed["attn"] == ([None] * 4 if model_type == "phi3" else [unit, 2 * unit, 3 * unit, None])
    tokens, before = torch.randint(1, 96, (2, 17)), gated.model.state_dict()
    found = []
    for choice in (None, narrow):
        leaves = {kind: value.clone().requires_grad_() for kind, value in gates.items()}
        squares = {kind: torch.zeros_like(value) for kind, value in gates.items()}
        with gated.masks(leaves, squares, choice):
            logits = gated.model(tokens).logits
            logits.logsumexp(-1).sum().backward()
        found.append((logits, {kind: leaf.grad for kind, leaf in leaves.items()}, squares))
    torch.testing.assert_close(found[1][0], found[0][0], atol=2e-5, rtol=0)
    for part, (kind, value) in itertools.product((1, 2), gates.items()):
        masked, narrowed = found[0][part][kind], found[1][part][kind]
        largest = float(masked[value > 0].abs().max())
        torch.testing.assert_close(narrowed[value > 0], masked[value > 0], atol=1e-4 * largest, rtol=1e-3)
    assert not found[1][1]["mlp"][0, 8:].any() and found[0][1]["mlp"][0, 8:].any()  # really not computed
    after = gated.model.state_dict()
    assert all(after[name].data_ptr() == tensor.data_ptr() for name, tensor in before.items())
    narrow.follow({kind: torch.ones(shape, dtype=torch.bool) for kind, shape in gated.shapes.items()})
    with torch.no_grad(), gated.masks(dict(gates), None, narrow):  # all are computed again
        torch.testing.assert_close(gated.model(tokens).logits, found[0][0], atol=2e-5, rtol=0)
