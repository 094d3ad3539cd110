"""Budgets in parameters, FLOPs and KV-cache bytes: never above, within one unit; widths that split over devices."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MixtralConfig

from ddp_prune.budget import Pool, make_pools
from ddp_prune.gates import Masks
from ddp_prune.recipe import Recipe
from ddp_vllm.costs import prices, whole_model
from ddp_vllm.errors import SettingError
from ddp_vllm.families import Dimensions, dense_layers, dimensions_of, unit_shapes
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
    """Which spares Gemma the padding of its KV cache (`ddp_plugins/limits.py`)."""
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
    """By the widths that are exported, whichever the unit: a KV head goes only with its last query head."""
    pools = _pools(head_unit=head_unit, budget=budget, scope=scope, sparsity=sparsity)
    layers = _widths(_choose(pools, seed), head_unit)
    wanted, price = (1 - sparsity) * _cost(budget, dense_layers(DENSE)), prices(budget, DENSE, SHAPES, 2048)[0]
    assert _cost(budget, layers) <= wanted
    if all(layer.intermediate_size < 96 for layer in layers):  # what one layer leaves over, another takes
        assert wanted - price.channel - 1 < _cost(budget, layers)
    for row in [layers] if scope == "global" else [[layer] for layer in layers]:
        some_channel_left_out = any(layer.intermediate_size < 96 for layer in row)
        unit = price.channel if some_channel_left_out else 2 * price.query_head + price.kv_head
        assert wanted * len(row) / len(layers) - unit - 1 < sum(price.of(layer) for layer in row)
    if budget == "kv-bytes":
        assert all(layer.intermediate_size == 96 for layer in layers)  # channels have no cache
        assert all(count == 2 for layer in layers for count in layer.query_heads_per_kv_head)  # nothing gained by less


def test_layers_share_the_budget() -> None:
    for layer in _widths(_choose(_pools(budget="params", scope="layer")), "kv-group"):
        spent = prices("params", DENSE, SHAPES, 2048)[0].of(layer)
        assert spent == pytest.approx(0.6 * _cost("params", dense_layers(DENSE)) / 3, abs=2500)


@pytest.mark.parametrize("target", [60_000, 100_000, 120_000])
def test_a_target_is_that_of_the_whole_model(target: int) -> None:
    (pool,) = _pools(budget="params", target=target)
    whole = whole_model("params", DENSE, dense_layers(DENSE), SHAPES, 2048)
    assert whole - pool.total == UNPRUNABLE
    left = UNPRUNABLE + _cost("params", _widths(_choose([pool]), "kv-group"))
    assert target - 3 * 64 < left <= target
    assert f"keep {target - UNPRUNABLE:,} of {pool.total:,.0f} params of attn, mlp" in pool.describe()


@pytest.mark.parametrize("target", [1e3, UNPRUNABLE, 1e9])
def test_an_impossible_target_states_the_unprunable_part(target: float) -> None:
    with pytest.raises(SettingError, match=rf"target is {target:,.0f} params.*{UNPRUNABLE:,} cannot be pruned"):
        _pools(budget="params", target=target)


def test_units_stay_exact_for_each_module_type() -> None:
    for head_unit, heads in (("kv-group", 7), ("query-head", 14)):
        support = _choose(_pools(head_unit=head_unit))
        assert int(support["attn"].sum()) == heads and int(support["mlp"].sum()) == 173


def test_attention_of_a_mixture_has_no_sparsity_of_its_own() -> None:
    with pytest.raises(SettingError, match="no attention is pruned"):
        _pools(MOE, attention_sparsity=0.2)
    for budget in ({"budget": "params"}, {"budget": "latency", "sparsity": 0.0, "speedup": 1.2}):
        for sparsity in (0.0, 0.2):
            with pytest.raises(SettingError, match="requires a sparsity and the budget units"):
                _pools(attention_sparsity=sparsity, **budget)


@pytest.mark.parametrize("sparsity", [0.001, 0.999])
def test_a_budget_that_removes_all_or_nothing_is_refused(sparsity: float) -> None:
    with pytest.raises(SettingError, match=r"keeps (0|12) of 12 attn units, where the least that can be kept is 1"):
        _pools(sparsity=sparsity)


@pytest.mark.parametrize("budget", ["params", "flops"])
def test_a_budget_below_the_cheapest_unit_is_refused(budget: str) -> None:
    with pytest.raises(SettingError, match=rf"keeps 184 of [\d,]+ {budget} of experts, where the least .* is 192"):
        _pools(MOE, budget=budget, sparsity=0.995)
    assert _choose(_pools(MOE, budget=budget, sparsity=0.994))["experts"].sum() == 1


def test_open_gates_stay_before_closed_ones_whatever_they_cost() -> None:
    (pool,) = _pools(budget="params", sparsity=0.5)
    generator = torch.Generator().manual_seed(0)
    saliency = {kind: torch.rand(shape, generator=generator) for kind, shape in pool.shapes.items()}
    alive = {kind: torch.rand(shape, generator=generator) < 0.4 for kind, shape in pool.shapes.items()}
    support = pool.choose(saliency, alive)
    for kind in pool.shapes:
        assert (support[kind] & alive[kind]).sum() == alive[kind].sum()  # 0.4 of all fit into a half


def test_joined_and_back() -> None:
    for scope in ("global", "layer"):
        (pool,) = _pools(budget="params", scope=scope)
        values = {kind: torch.rand(shape) for kind, shape in pool.shapes.items()}
        assert len(pool.join(values)) == (3 if scope == "layer" else 1)
        assert all(torch.equal(back, values[kind]) for kind, back in pool.part(pool.join(values)).items())


@pytest.mark.parametrize("scope", ["global", "layer", "expert"])
@pytest.mark.parametrize("budget", ["units", "params", "flops"])
def test_experts_under_every_budget(budget: str, scope: str) -> None:
    """All channels cost the same, so every budget keeps the same number."""
    support = _choose(_pools(MOE, budget=budget, scope=scope))["experts"]
    assert support.shape == (2, 4, 24) and int(support.sum()) == 115
    counts = {"global": None, "layer": support.sum((1, 2)), "expert": support.sum(2)}[scope]
    assert counts is None or int(counts.max() - counts.min()) <= 1


def test_experts_have_no_kv_cache_to_prune() -> None:
    with pytest.raises(SettingError, match="budget is 'kv-bytes', which does not depend on what is pruned here"):
        _pools(MOE, budget="kv-bytes")


@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
@pytest.mark.parametrize("budget", ["units", "params", "flops", "kv-bytes"])
@pytest.mark.parametrize(("tp", "align"), [(2, 1), (4, 6), (8, 1)])
def test_every_layer_splits_over_the_devices(tp: int, align: int, budget: str, head_unit: str) -> None:
    """8 devices are more than the 4 KV heads; then only whole layers of heads leave."""
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


@pytest.mark.parametrize(("tp", "head_unit"), [(3, "kv-group"), (16, "kv-group"), (5, "query-head")])
def test_a_size_that_cannot_work_names_the_layer_and_the_valid_sizes(tp: int, head_unit: str) -> None:
    with pytest.raises(
        SettingError, match=rf"tensor-parallel size {tp} .*(8 query heads|layer 0).*valid sizes: 1, 2, 4, 8"
    ):
        _pools(head_unit=head_unit, tp=tp)


def test_query_heads_of_kv_heads_that_do_not_split() -> None:
    config = DENSE | {"num_attention_heads": 12, "num_key_value_heads": 3}
    with pytest.raises(SettingError, match="valid sizes: 1, 3, 6, 12"):
        _pools(config, head_unit="query-head", tp=2)
    assert _pools(config, head_unit="kv-group", tp=2)[0].blocks == {"attn": 2}  # of three KV heads two or none stay


def test_blocks_wider_than_a_layer_are_refused() -> None:
    with pytest.raises(SettingError, match=r"align is 128.*block of 128 of the 3 × 96 mlp units.*smaller"):
        _pools(align=128)
    with pytest.raises(SettingError, match=r"align is 64.*block of 128"):
        _pools(align=64, tp=2)


def test_dimensions_know_the_units() -> None:
    sizes: Dimensions = dimensions_of(DENSE)
    assert unit_shapes(sizes, "kv-group") == _pools(budget="params")[0].shapes
