"""Mixtures of experts: gates on expert channels, their gradients, and layers that lose all experts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import EXPERT, MIXTURES, NUM_EXPERTS, write_model
from runs import edit_json, edit_weights
from transformers import AutoModelForCausalLM

from ddp_prune.core import experts as experts_module
from ddp_prune.core.experts import grouped, looped
from ddp_prune.core.gates import GatedModel, Masks
from ddp_prune.export import export
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import Source, open_source
from ddp_vllm.checkpoint import read_config
from ddp_vllm.errors import ModelError
from ddp_vllm.families import described, unit_shapes
from ddp_vllm.remote_code.module_widths import ModuleWidths

WIDTHS = (
    0,
    1,
    2,
    5,
    17,
    EXPERT,
    16,
    15,
)  # gone, one, even, odd, above a block of 16, dense, a block, below one
TOKENS = torch.randint(1, 96, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes the dense folder of a family, once."""
    made: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = write_model(model_type, tmp_path_factory.mktemp(model_type))
        return made[model_type]

    return make


def ragged_gates(source: Source) -> Masks:
    """Random scales; the experts of each layer have WIDTHS, turned from layer to layer."""
    generator = torch.Generator().manual_seed(1)
    shape = unit_shapes(source.sizes, "auto")["experts"]
    gates = torch.rand(shape, generator=generator) + 0.5
    for row in range(shape[0]):
        for expert in range(NUM_EXPERTS):
            width = WIDTHS[(expert + 3 * row) % NUM_EXPERTS]
            gates[row, expert, torch.randperm(EXPERT, generator=generator)[width:]] = 0.0
    return {"experts": gates}


def _gated(source: Source) -> GatedModel:
    return GatedModel(load_model(source, "float32"), source.family, source.sizes, "auto")


def _logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


def test_squares_are_those_of_each_token(dense: Any) -> None:
    """Tokens one by one through one layer give the parts of the gradient that are squared and summed."""
    gated = _gated(open_source(str(dense("mixtral"))))
    experts = gated.model.get_submodule("model.layers.1.mlp.experts")
    generator = torch.Generator().manual_seed(2)
    x, wanted = torch.randn(2, 6, 48, generator=generator)
    ids, shares = torch.tensor([[0, 2], [2, 5], [6, 0]] * 2), torch.rand(6, 2, generator=generator)
    gates = torch.rand(gated.shapes["experts"], generator=generator)

    def gradient(tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        leaf, squares = gates.clone().requires_grad_(), torch.zeros_like(gates)
        with gated.masks({"experts": leaf}, {"experts": squares}):
            (experts(x[tokens], ids[tokens], shares[tokens]) * wanted[tokens]).sum().backward()
        assert leaf.grad is not None
        return leaf.grad, squares

    parts = [gradient(slice(token, token + 1))[0] for token in range(6)]
    whole, squares = gradient(slice(None))
    torch.testing.assert_close(whole, torch.stack(parts).sum(0))
    torch.testing.assert_close(squares, torch.stack(parts).square().sum(0))
    assert squares[1, 2].min() > 0 and squares[1, 1].max() == 0  # a busy expert and an idle one
    assert all(parameter.grad is None for parameter in gated.model.parameters())


def test_gradients_are_slopes(dense: Any) -> None:
    """Of one layer in float64, for the masks and for the hidden states; idle experts among them."""
    gated = _gated(open_source(str(dense("mixtral"))))
    experts = gated.model.get_submodule("model.layers.1.mlp.experts").double()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 48, dtype=torch.float64, generator=generator, requires_grad=True)
    masks = torch.rand(gated.shapes["experts"], dtype=torch.float64, generator=generator, requires_grad=True)
    ids, shares = torch.tensor([[0, 2], [2, 5], [7, 0]] * 2), torch.rand(6, 2, generator=generator).double()

    def run(x: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        with gated.masks({"experts": masks}):
            return experts(x, ids, shares)

    assert torch.autograd.gradcheck(run, (x, masks), fast_mode=True)


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v2"])
def test_learns_in_bfloat16(model_type: str, dense: Any) -> None:
    """Routers hand out weights in other dtypes; the masks' gradient stays in float32."""
    source = open_source(str(dense(model_type)))
    gated = GatedModel(load_model(source, "bfloat16"), source.family, source.sizes, "auto")
    leaf = torch.ones(gated.shapes["experts"], requires_grad=True)
    with gated.masks({"experts": leaf}):
        gated.model(TOKENS).logits.float().square().mean().backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.float32
    assert leaf.grad.isfinite().all() and (leaf.grad != 0).float().mean() > 0.5


@pytest.mark.parametrize("sizes", [(5, 0, 7, 1), (0, 0, 13, 0), (0, 4, 0, 0)], ids=str)
def test_grouped_and_looped_agree(sizes: tuple[int, ...]) -> None:
    """Idle experts first, last and between; all slots at one expert."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(sum(sizes), 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(4, 24, 16, generator=generator).bfloat16()
    ends = torch.tensor(sizes).cumsum(0).int()
    results = [function(x, weight, ends) for function in (grouped, looped)]
    gradients = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in results]
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_kernel_that_leaves_gradients_of_idle_experts_uninitialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's kernel does on Blackwell; no such device runs here."""
    sizes = (0, 5, 0, 3)
    ends, x = torch.tensor(sizes).cumsum(0).int(), torch.randn(8, 16)
    weight = torch.randn(4, 24, 16, requires_grad=True)

    def kernel(x: torch.Tensor, weight_EIO: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        filled = weight_EIO.clone()
        filled.register_hook(lambda gradient: gradient.where((torch.tensor(sizes) > 0)[:, None, None], torch.nan))
        return looped(x, filled.transpose(-2, -1), offs)

    monkeypatch.setattr(experts_module.F, "grouped_mm", kernel)
    gradients = [
        torch.autograd.grad(function(x, weight, ends).square().sum(), weight)[0] for function in (grouped, looped)
    ]
    assert torch.equal(*gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_grouped_and_looped_agree_on_a_gpu(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(dense("qwen3_moe")))
    gated = GatedModel(load_model(source, "bfloat16").cuda(), source.family, source.sizes, "auto")
    gates = {"experts": ragged_gates(source)["experts"].cuda()}
    with gated.masks(gates):
        fast = _logits(gated.model, TOKENS.cuda()).float()
        monkeypatch.setattr(experts_module, "can_group", lambda _: False)
        slow = _logits(gated.model, TOKENS.cuda()).float()
    assert (fast.softmax(-1) - slow.softmax(-1)).abs().max() < 0.02


def test_a_published_deepseek_config_loads_without_its_code(dense: Any, tmp_path: Path) -> None:
    """DeepSeekMoE-16B's config.json names Python files that we neither download nor run."""
    folder = Path(shutil.copytree(dense("deepseek"), tmp_path / "dense"))
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "head_dim", "mlp_bias", "transformers_version", "dtype"):
        config.pop(key, None)
    auto_map = {"AutoConfig": "configuration_deepseek.DeepseekConfig"}
    auto_map["AutoModelForCausalLM"] = "modeling_deepseek.DeepseekForCausalLM"
    config |= {
        "architectures": ["DeepseekForCausalLM"], "auto_map": auto_map, "aux_loss_alpha": 0.001, "rope_scaling": None,
        "rope_theta": 10000, "scoring_func": "softmax", "seq_aux": True, "torch_dtype": "float32", "pretraining_tp": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    source = open_source(str(folder))
    model = load_model(source, "auto")
    assert torch.equal(_logits(model), _logits(load_model(open_source(str(dense("deepseek"))), "auto")))
    export(source, ragged_gates(source), tmp_path / "out", head_unit="auto", provenance={})
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    with GatedModel(model, source.family, source.sizes, "auto").masks(ragged_gates(source)):
        torch.testing.assert_close(_logits(pruned), _logits(model), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((model_type, {}) for model_type in MIXTURES),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("qwen2_moe", {"decoder_sparse_step": 3}),
        ("deepseek", {"moe_layer_freq": 2}),
        ("deepseek_v2", {"first_k_dense_replace": 2}),
    ],
    ids=str,
)
def test_a_config_alone_describes_what_is_found_in_the_model(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Latency profiles, whole experts and convert have no more than the config."""
    folder = write_model(model_type, tmp_path, **changes)
    structure = open_source(str(folder)).structure
    by_config = ModuleWidths.of(described(read_config(folder)))
    assert structure and structure.widths.experts == by_config.experts
    sizes = [[layer.expert_intermediate_sizes for layer in widths.layers] for widths in (structure.widths, by_config)]
    assert sizes[0] == sizes[1] and any(sizes[0])


def test_a_layer_may_lose_all_its_experts(dense: Any, tmp_path: Path) -> None:
    """What is left of the block is its shared expert; the note says that fewer are left than a token is sent to."""
    source = open_source(str(dense("qwen2_moe")))
    gates, gated = ragged_gates(source), _gated(source)
    gates["experts"][1] = 0.0
    gates["experts"][2, 2:] = 0.0
    export(source, gates, tmp_path / "out", head_unit="auto", provenance={})
    with gated.masks(gates):
        masked = _logits(gated.model)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    torch.testing.assert_close(_logits(model), masked, atol=2e-5, rtol=0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "fewer experts left than the 3 each token is sent to, in layers 1 (0 left), 2 (2 left)" in card


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other width": ({"moe_intermediate_size": 32}, r"shape \[64, 64\].*requires 32 along axis"),
    "a tensor missing": ({}, r"tensor model\.layers\.2\.mlp\.experts\.3\.down_proj\.weight is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_dense_model_that_cannot_be_pruned(case: str, dense: Any, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    folder = Path(shutil.copytree(dense("qwen3_moe"), tmp_path / "dense"))
    edit_json(folder / "config.json", **changes)
    if not changes:
        edit_weights(folder, lambda weights: weights.pop("model.layers.2.mlp.experts.3.down_proj.weight"))
    with pytest.raises(ModelError, match=message):
        open_source(str(folder))
