"""Budgets in units, parameters, FLOPs and KV-cache bytes: never exceeded, met within a unit, in widths that split."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MixtralConfig

from ddp_prune.core.budget import Pool
from ddp_prune.core.gates import Masks
from ddp_prune.pools import make_pools
from ddp_prune.recipe import Recipe
from ddp_vllm.costs import prices, whole_model
from ddp_vllm.errors import SettingError
from ddp_vllm.families import dense_layers, dimensions_of
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.tensor_parallel import tensor_parallel_sizes

DENSE = LlamaConfig(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=4, head_dim=8,
).to_dict() | {"model_type": "llama"}  # fmt: skip
MOE = MixtralConfig(
    vocab_size=320, hidden_size=64, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
).to_dict() | {"model_type": "mixtral"}  # fmt: skip
SHAPES = {  # enough of a model for its totals: embeddings, and what the layers of DENSE have
    "model.embed_tokens.weight": [320, 64], "lm_head.weight": [320, 64],
    **{f"model.layers.{index}.{name}.weight": shape for index in range(3) for name, shape in (
        ("self_attn.q_proj", [64, 64]), ("self_attn.k_proj", [32, 64]), ("self_attn.v_proj", [32, 64]),
        ("self_attn.o_proj", [64, 64]), ("mlp.gate_proj", [96, 64]), ("mlp.up_proj", [96, 64]),
        ("mlp.down_proj", [64, 96]), ("input_layernorm", [64]), ("post_attention_layernorm", [64]),
    )},
}  # fmt: skip
UNPRUNABLE = 2 * 320 * 64 + 6 * 64


def _pools(config: dict[str, Any] = DENSE, head_unit: str = "kv-group", **changes: Any) -> Sequence[Pool]:
    values = {"model": "m"} | ({} if "target" in changes else {"sparsity": 0.4}) | changes
    return make_pools(config, SHAPES, dimensions_of(config), head_unit, Recipe(**values))


def _choose(pools: Sequence[Pool], seed: int = 0, closed: float = 0.3) -> Masks:
    """Round random saliencies of very different sizes, some gates closed."""
    generator = torch.Generator().manual_seed(seed)
    chosen: Masks = {}
    for pool in pools:
        saliency = {kind: torch.rand(shape, generator=generator).pow(4) for kind, shape in pool.shapes.items()}
        alive = {kind: torch.rand(shape, generator=generator) > closed for kind, shape in pool.shapes.items()}
        chosen |= pool.choose(saliency, alive)
    return chosen


def _widths(support: Masks, head_unit: str) -> list[LayerWidths]:
    layers = []
    for heads, channels in zip(support["attn"], support["mlp"], strict=True):
        counts = [2] * int(heads.sum()) if head_unit == "kv-group" else [int(n) for n in heads.view(4, 2).sum(1) if n]
        layers.append(LayerWidths(query_heads_per_kv_head=tuple(counts), intermediate_size=int(channels.sum())))
    return layers


def _cost(budget: str, layers: list[LayerWidths]) -> float:
    return sum(p.of(w) for p, w in zip(prices(budget, DENSE, SHAPES, 2048), layers, strict=True))


@settings(max_examples=10)
@given(st.sampled_from([0.25, 0.5, 0.75]), st.integers(0, 2**31))
def test_a_budget_of_each_layer_that_is_whole_kv_heads_keeps_as_many_in_every_layer(sparsity: float, seed: int) -> None:
    """So Gemma needs no padding of its KV cache (`ddp_plugins/limits.py`)."""
    support = _choose(_pools(scope="layer", sparsity=sparsity), seed)
    assert support["attn"].sum(1).tolist() == [4 * (1 - sparsity)] * 3


@settings(max_examples=25)
@given(
    st.sampled_from(["params", "flops", "kv-bytes"]), st.sampled_from(["kv-group", "query-head"]),
    st.sampled_from(["global", "layer"]), st.floats(0.05, 0.95), st.integers(0, 2**31),
)  # fmt: skip
@example("params", "kv-group", "layer", 0.15625, 0)  # a layer keeps every channel and has no room for a KV group
def test_a_budget_is_met_from_below_within_one_unit(
    budget: str, head_unit: str, scope: str, sparsity: float, seed: int
) -> None:
    """Measured by the exported widths: a KV head is removed only with its last query head."""
    pools = _pools(head_unit=head_unit, budget=budget, scope=scope, sparsity=sparsity)
    layers = _widths(_choose(pools, seed), head_unit)
    wanted, price = (1 - sparsity) * _cost(budget, dense_layers(DENSE)), prices(budget, DENSE, SHAPES, 2048)[0]
    assert _cost(budget, layers) <= wanted
    if all(layer.intermediate_size < 96 for layer in layers):  # another layer takes what one leaves of its budget
        assert wanted - price.channel - 1 < _cost(budget, layers)
    for row in [layers] if scope == "global" else [[layer] for layer in layers]:
        some_channel_left_out = any(layer.intermediate_size < 96 for layer in row)
        unit = price.channel if some_channel_left_out else 2 * price.query_head + price.kv_head
        assert wanted * len(row) / len(layers) - unit - 1 < sum(price.of(layer) for layer in row)
    if budget == "kv-bytes":
        assert all(layer.intermediate_size == 96 for layer in layers)  # channels have no cache
        assert all(count == 2 for layer in layers for count in layer.query_heads_per_kv_head)  # nothing gained by less


@pytest.mark.parametrize("target", [60_000, 100_000, 120_000])
def test_a_target_is_that_of_the_whole_model(target: int) -> None:
    (pool,) = _pools(budget="params", target=target)
    whole = whole_model("params", DENSE, dense_layers(DENSE), SHAPES, 2048)
    assert whole - pool.total == UNPRUNABLE
    left = UNPRUNABLE + _cost("params", _widths(_choose([pool]), "kv-group"))
    assert target - 3 * 64 < left <= target
    assert f"keep {target - UNPRUNABLE:,} of {pool.total:,.0f} params of attn, mlp" in pool.describe()


def test_open_gates_rank_before_closed_ones_whatever_their_cost() -> None:
    (pool,) = _pools(budget="params", sparsity=0.5)
    generator = torch.Generator().manual_seed(0)
    saliency = {kind: torch.rand(shape, generator=generator) for kind, shape in pool.shapes.items()}
    alive = {kind: torch.rand(shape, generator=generator) < 0.4 for kind, shape in pool.shapes.items()}
    support = pool.choose(saliency, alive)
    for kind in pool.shapes:
        assert (support[kind] & alive[kind]).sum() == alive[kind].sum()  # 0.4 of all fit into a half


@pytest.mark.parametrize("scope", ["global", "layer", "expert"])
@pytest.mark.parametrize("budget", ["units", "params", "flops"])
def test_experts_under_every_budget(budget: str, scope: str) -> None:
    """All channels cost the same, so every budget keeps the same number."""
    support = _choose(_pools(MOE, budget=budget, scope=scope))["experts"]
    assert support.shape == (2, 4, 24) and int(support.sum()) == 115
    counts = {"global": None, "layer": support.sum((1, 2)), "expert": support.sum(2)}[scope]
    assert counts is None or int(counts.max() - counts.min()) <= 1


@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
@pytest.mark.parametrize("budget", ["units", "params", "flops", "kv-bytes"])
@pytest.mark.parametrize(("tp", "align"), [(2, 1), (4, 6), (8, 1)])
def test_every_layer_splits_over_the_devices(tp: int, align: int, budget: str, head_unit: str) -> None:
    """With 8 devices and 4 KV heads, a layer keeps all its heads or none."""
    pools = _pools(head_unit=head_unit, budget=budget, tp=tp, align=align)
    for seed in range(4):
        layers = _widths(_choose(pools, seed), head_unit)
        assert tp in tensor_parallel_sizes(DENSE, layers)
        assert all(layer.intermediate_size % (tp * align) == 0 for layer in layers)
        for layer in layers:
            assert len(set(layer.query_heads_per_kv_head)) <= 1
        wanted = 0.6 * sum(pool.total for pool in pools)
        if budget == "kv-bytes":
            assert _cost(budget, layers) <= wanted


THREE = DENSE | {"num_attention_heads": 12, "num_key_value_heads": 3}
UNPRUNED = rf"target is {{}} params.*{UNPRUNABLE:,} cannot be pruned"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"config": MOE, "budget": "kv-bytes"}, "budget is 'kv-bytes', which does not depend on what is pruned here"),
    ({"config": MOE, "budget": "params", "sparsity": 0.995}, "keeps 184 of .* params of experts, .* the least .* 192"),
    ({"sparsity": 0.001}, "keeps 12 of 12 attn units, where the least that can be kept is 1"),
    ({"sparsity": 0.999}, "keeps 0 of 12 attn units, where the least that can be kept is 1"),
    ({"budget": "params", "target": UNPRUNABLE}, UNPRUNED.format(f"{UNPRUNABLE:,}")),
    ({"budget": "params", "target": 1e9}, UNPRUNED.format("1,000,000,000")),
    ({"tp": 5, "head_unit": "query-head"}, "tensor-parallel size 5 .*valid sizes: 1, 2, 4, 8"),
    ({"config": THREE, "head_unit": "query-head", "tp": 2}, "valid sizes: 1, 3, 6, 12"),
    ({"align": 128}, r"block of 128 of the 3 × 96 mlp units; choose align below 128"),
    ({"align": 64, "tp": 2}, r"block of 128.*choose align below 64 or tp below 2 or"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=lambda each: str(each)[-60:])
def test_a_budget_that_cannot_be_met_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        _pools(**changes)


def test_the_least_that_can_be_kept_is_kept() -> None:
    for budget in ("params", "flops"):
        assert _choose(_pools(MOE, budget=budget, sparsity=0.994))["experts"].sum() == 1
    assert _pools(THREE, tp=2)[0].blocks == {"attn": 2}  # two of three KV heads, or none
