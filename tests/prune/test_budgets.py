"""Budgets in units, parameters, FLOPs, KV-cache bytes and measured time: chosen well, never exceeded, met closely."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import seams
import torch
from commands import invoke, passed
from family_cases import CASES, SIZES
from latency_profiles import CONFIG, MIXTURE, written
from runs import SMALL
from seams import Masks, Pool, Recipe, best_support, choose_counts, cut_rows, make_pools
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.costs import attended, prices, whole_model
from ddp_vllm.dimensions import BLOCK_NAMES, dimensions_of, widths_of
from ddp_vllm.errors import SettingError
from ddp_vllm.latency import read_profile
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.tensor_parallel import tensor_parallel_sizes


def best_of(importance: torch.Tensor, choices: list[tuple[int, ...]]) -> float:
    """Return the most importance that one of these numbers of units per row can keep."""
    ranked = importance.sort(1, descending=True).values
    return max(sum(float(row[:n].sum()) for row, n in zip(ranked, choice, strict=True)) for choice in choices)


def test_aligned_support_has_only_multiples_and_the_highest_importance() -> None:
    """`align` often does not divide the units of a row."""
    generator = torch.Generator().manual_seed(0)
    for rows, num_units in itertools.product((1, 2, 3), (2, 3, 5, 7)):
        for align, kept in itertools.product(range(1, num_units + 1), range(1, rows * num_units + 1)):
            importance = torch.randint(0, 6, (rows, num_units), generator=generator).float()  # ties too
            most = min(kept // align, rows * (num_units // align)) * align
            counts = itertools.product(range(0, num_units + 1, align), repeat=rows)
            possible = [choice for choice in counts if sum(choice) == most]
            (support,) = best_support([cut_rows(importance, block=align)], torch.tensor([float(kept)]))
            assert tuple(support.sum(1).tolist()) in possible and support.dtype == torch.bool
            assert float(importance[support].sum()) == best_of(importance, possible)
            for row, keep in zip(importance, support, strict=True):  # a row keeps its best units
                assert not keep.any() or keep.all() or row[keep].min() >= row[~keep].max()


def test_query_heads_pay_for_the_kv_head_they_share_once() -> None:
    """Four KV heads with three query heads each: against every number of query heads for every KV head."""
    generator = torch.Generator().manual_seed(0)
    for budget in range(51):
        importance = torch.randint(0, 20, (4, 3), generator=generator).double()
        rows = cut_rows(importance, cost_R=torch.full((4,), 2.0), fixed_R=torch.full((4,), 5.0))
        (kept,) = best_support([rows], torch.tensor([float(budget)]))
        counts = itertools.product(range(4), repeat=4)
        possible = [choice for choice in counts if 2.0 * sum(choice) + 5.0 * sum(map(bool, choice)) <= budget]
        assert 2.0 * int(kept.sum()) + 5.0 * int(kept.any(1).sum()) <= budget
        assert float(importance[kept].sum()) >= best_of(importance, possible) - float(importance.sum(1).max())


@pytest.mark.parametrize(("most_choices", "least", "mean"), [(1 << 16, 1.0, 1.0), (1, 0.85, 0.98)])
def test_counts_are_chosen_as_well_as_by_trying_all(
    most_choices: int, least: float, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rows of different lengths whose costs do not grow evenly; an impossible budget is refused."""
    monkeypatch.setattr(seams.selection, "MOST_CHOICES", most_choices)
    generator, shares = torch.Generator().manual_seed(0), []
    columns = torch.cartesian_prod(*[torch.arange(6)] * 4).T
    for _ in range(50):
        importance, cost = torch.rand(2, 4, 6, generator=generator).double().cumsum(2)
        importance[0, 4:], cost[0, 4:] = -torch.inf, torch.inf
        values, costs = (rows.gather(1, columns).sum(0) for rows in (importance, cost))
        budget = float(cost[:, 0].sum()) + 2.0
        chosen = choose_counts(importance, cost, budget)
        assert cost.gather(1, chosen[:, None]).sum() <= budget
        shares.append(float(importance.gather(1, chosen[:, None]).sum() / values[costs <= budget].max()))
    assert min(shares) >= least and sum(shares) / len(shares) >= mean
    with pytest.raises(SettingError, match="no selection of units meets the budget"):
        choose_counts(importance, cost, float(cost[:, 0].sum()) - 0.01)


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


def pools_for(config: dict[str, Any] = DENSE, head_unit: str = "kv-group", **changes: Any) -> Sequence[Pool]:
    values = {"model": "m"} | ({} if "target" in changes else {"sparsity": 0.4}) | changes
    return make_pools(config, SHAPES, dimensions_of(config), head_unit, Recipe(**values))


def chosen_by(pools: Sequence[Pool], seed: int = 0) -> Masks:
    """Round random saliencies of very different sizes, some gates closed."""
    generator = torch.Generator().manual_seed(seed)
    chosen: Masks = {}
    for pool in pools:
        importance = {kind: torch.rand(shape, generator=generator).pow(4) for kind, shape in pool.shapes.items()}
        alive = {kind: torch.rand(shape, generator=generator) > 0.3 for kind, shape in pool.shapes.items()}
        chosen |= pool.choose(importance, alive)
    return chosen


def kept_widths(support: Masks, head_unit: str = "kv-group") -> list[LayerWidths]:
    layers = []
    for heads, channels in zip(support["attn"], support["mlp"], strict=True):
        counts = [2] * int(heads.sum()) if head_unit == "kv-group" else [int(n) for n in heads.view(4, 2).sum(1) if n]
        layers.append(LayerWidths(query_heads_per_kv_head=tuple(counts), intermediate_size=int(channels.sum())))
    return layers


def cost_of(budget: str, layers: list[LayerWidths]) -> float:
    return sum(p.of(w) for p, w in zip(prices(budget, DENSE, SHAPES, 2048), layers, strict=True))


@pytest.mark.parametrize("sparsity", [0.05, 0.15625, 0.4321, 0.95])  # by the second, a layer keeps every channel
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
@pytest.mark.parametrize("budget", ["params", "flops", "kv-bytes"])
def test_a_budget_is_met_within_one_unit(budget: str, head_unit: str, scope: str, sparsity: float) -> None:
    """Measured by the exported widths: a KV head is removed only with its last query head."""
    pools = pools_for(head_unit=head_unit, budget=budget, scope=scope, sparsity=sparsity)
    layers, price = kept_widths(chosen_by(pools), head_unit), prices(budget, DENSE, SHAPES, 2048)[0]
    wanted = (1 - sparsity) * cost_of(budget, widths_of(DENSE).dense_layers)
    assert cost_of(budget, layers) <= wanted
    if all(layer.intermediate_size < 96 for layer in layers):  # another layer takes what one leaves of its budget
        assert wanted - price.channel - 1 < cost_of(budget, layers)
    for row in [layers] if scope == "global" else [[layer] for layer in layers]:
        some_channel_left_out = any(layer.intermediate_size < 96 for layer in row)
        unit = price.channel if some_channel_left_out else 2 * price.query_head + price.kv_head
        assert wanted * len(row) / len(layers) - unit - 1 < sum(price.of(layer) for layer in row)
    if budget == "kv-bytes":
        assert all(layer.intermediate_size == 96 for layer in layers)  # channels have no cache
        assert all(count == 2 for layer in layers for count in layer.query_heads_per_kv_head)  # nothing gained by less


@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
@pytest.mark.parametrize("budget", ["units", "params", "kv-bytes"])
@pytest.mark.parametrize(("tp", "align"), [(2, 1), (4, 6), (8, 1)])
def test_every_layer_splits_over_the_devices(tp: int, align: int, budget: str, head_unit: str) -> None:
    """With 8 devices and 4 KV heads, a layer keeps all its heads or none."""
    pools = pools_for(head_unit=head_unit, budget=budget, tp=tp, align=align)
    for seed in range(4):
        layers = kept_widths(chosen_by(pools, seed), head_unit)
        assert tp in tensor_parallel_sizes(DENSE, layers)
        assert all(layer.intermediate_size % (tp * align) == 0 for layer in layers)
        assert all(len(set(layer.query_heads_per_kv_head)) <= 1 for layer in layers)
        assert budget != "kv-bytes" or cost_of(budget, layers) <= 0.6 * sum(pool.total for pool in pools)


UNPRUNED = rf"target is {{}} params.*{UNPRUNABLE:,} cannot be pruned"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"config": MOE, "budget": "kv-bytes"}, "budget is 'kv-bytes', which does not depend on what is pruned here"),
    ({"sparsity": 0.001}, "keeps 12 of 12 attn units, where the least that can be kept is 1"),
    ({"budget": "params", "target": 1e9}, UNPRUNED.format("1,000,000,000")),
    ({"tp": 5, "head_unit": "query-head"}, "tensor-parallel size 5 .*valid sizes: 1, 2, 4, 8"),
    ({"align": 128}, r"block of 128 of the 3 × 96 mlp units; choose align below 128"),
    ({"tp": 4, "sparsity": 0.95}, "no block of 4 .*attn units; choose tp below 4 or a budget that"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=lambda each: str(each)[-60:])
def test_a_budget_that_cannot_be_met_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        pools_for(**changes)


CONTEXT = 9  # tokens attended to, the newest among them; longer than the windows of 6
MODELS = {
    **{name: CASES[name] for name in ("llama", "qwen2", "granite", "phi3", "gemma2", "gemma3_text")},
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_prices_are_those_of_real_models(name: str) -> None:
    """Their parameters, operations as torch counts them in matrix products, and the cache of one more token: in float32
    twice as large as at 16 bits."""
    model: Any = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation="eager").eval()
    config = MODELS[name].to_dict()
    shapes = {key: list(value.shape) for key, value in model.named_parameters()}

    def total(budget: str) -> float:
        return whole_model(budget, config, widths_of(config).dense_layers, shapes, CONTEXT)

    assert total("params") == model.num_parameters()
    if name == "mixtral":  # a token costs only the experts it is routed to
        matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
        experts, attention, embedding = 4 * 4 * 3 * 64 * 72, 4 * CONTEXT * 64 * 4, 96 * 64
        assert total("flops") == 2 * (matrices - embedding - experts / 2) + attention
        assert prices("flops", config, shapes, CONTEXT)[0].expert_channel == 6 * 64 / 2
        return
    cache = DynamicCache(config=None)  # keeps every token, as the prices of a KV cache assume
    tokens = torch.randint(1, 96, (1, CONTEXT))
    with torch.no_grad():
        model(tokens[:, :-1], past_key_values=cache)
        with FlopCounterMode(display=False) as counter:
            model(tokens[:, -1:], past_key_values=cache)
    unseen = 0.0  # eager attention masks what is outside a window, but multiplies it all the same
    for seen in attended(config, CONTEXT):
        unseen += 4.0 * config["num_attention_heads"] * model.model.layers[0].self_attn.head_dim * (CONTEXT - seen)
    positions = 2 * model.model.rotary_emb.inv_freq.numel() if hasattr(model.model.rotary_emb, "inv_freq") else 0
    counted = counter.get_total_flops() - unseen
    assert total("flops") == pytest.approx(counted, abs=max(200, 8 * positions))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / CONTEXT
    assert 2 * total("kv-bytes") == held


def test_sliding_windows_limit_the_attended_tokens() -> None:
    gemma = CASES["gemma2"].to_dict()
    assert attended(gemma, 9) == [6, 9, 6, 9]
    plain = {key: value for key, value in gemma.items() if key != "layer_types"}
    assert attended(plain, 9) == [6, 9, 6, 9]  # as the class has it, when the file does not say
    assert attended(plain | {"model_type": "ddp_gemma2", "ddp_layers": None}, 4) == [4, 4, 4, 4]
    assert attended(MistralConfig(**SIZES, sliding_window=6).to_dict(), 9) == [6] * 4
    assert attended(Qwen2Config(**SIZES, sliding_window=6).to_dict(), 9) == [9] * 4


def timed(profile: Path, config: dict[str, Any] = CONFIG, **changes: Any) -> tuple[Recipe, Pool]:
    """Return a recipe with a budget in measured time, and its pool."""
    values: dict[str, Any] = {"speedup": 1.3, "context_length": 256, "budget": "latency", "profile": str(profile)}
    recipe, sizes = Recipe(model="m", **values | changes), dimensions_of(config)
    sizes = replace(sizes, blocks=recipe.blocks or sizes.blocks)
    (pool,) = make_pools(config, {}, sizes, "kv-group", recipe, read_profile(profile))
    return recipe, pool


def saliency(pool: Pool, seed: int) -> Masks:
    generator = torch.Generator().manual_seed(seed)
    return {kind: torch.rand(shape, generator=generator).pow(3) for kind, shape in pool.shapes.items()}


def all_open(pool: Pool) -> Masks:
    return {kind: torch.ones(shape, dtype=torch.bool) for kind, shape in pool.shapes.items()}


def shown(pool: Pool, kept: Masks, profile: Path, recipe: Recipe) -> float:
    """Return the speedup that the share of time on the progress bar stands for."""
    times = read_profile(profile).times(recipe.workload)
    removable = times.removable(BLOCK_NAMES[kind] for kind in kept)
    return times.dense / (times.dense - removable + 1e-6 * (1 - pool.removed_share(kept)) * pool.total)


@pytest.mark.parametrize("speedup", [1.05, 1.3, 1.9])
@pytest.mark.parametrize("align", [1, 96])
def test_the_speedup_is_met_within_a_step_of_the_staircase(speedup: float, align: int, tmp_path: Path) -> None:
    path = written(tmp_path)
    recipe, pool = timed(path, speedup=speedup, align=align)
    for seed in range(4):
        kept = pool.choose(saliency(pool, seed), all_open(pool))
        widths = kept_widths(kept)
        predicted, _, _ = read_profile(path).speedup(widths, recipe.workload)
        assert shown(pool, kept, path, recipe) == pytest.approx(predicted)
        assert speedup <= predicted < speedup * (1.04 if align == 1 else 1.08)
        assert all(layer.intermediate_size % 128 == 0 and layer.intermediate_size % align == 0 for layer in widths)
    assert "µs per step of attn, mlp" in pool.describe()


@pytest.mark.parametrize(("block", "units"), [("attn", 4), ("mlp", 1024)])
def test_the_speedup_is_met_by_one_kind_of_blocks(block: str, units: int, tmp_path: Path) -> None:
    """The other one stays as it is, and so do its time and its share of the most that is possible."""
    path = written(tmp_path, mixture=0.01)
    recipe, pool = timed(path, speedup=1.1, prune=BLOCK_NAMES[block])
    kept, times = pool.choose(saliency(pool, 0), all_open(pool)), read_profile(path).times(recipe.workload)
    dense = {kind: torch.ones(shape, dtype=torch.bool) for kind, shape in {"attn": (4, 4), "mlp": (4, 1024)}.items()}
    assert [*kept] == [block] and dense[block].shape == kept[block].shape
    predicted, _, _ = read_profile(path).speedup(kept_widths(dense | kept), recipe.workload)
    assert 1.1 <= predicted < 1.2 and shown(pool, kept, path, recipe) <= predicted + 1e-9
    most = times.max_speedup([BLOCK_NAMES[block]])
    assert most < times.max_speedup(times.curves)
    with pytest.raises(SettingError, match=f"but {most:.2f} is the most .* outside of {BLOCK_NAMES[block]}"):
        timed(path, speedup=most + 0.01, prune=BLOCK_NAMES[block])


@pytest.mark.parametrize(("speedup", "kernel"), [(1.1, 0.9), (1.3, 1.0), (1.3, 1.2), (2.0, 0.9)])
def test_the_speedup_of_a_mixture_is_met_by_its_packed_widths(speedup: float, kernel: float, tmp_path: Path) -> None:
    """Removed experts do not save the fixed cost of their layer, and the dense model runs another kernel."""
    path = written(tmp_path, MIXTURE, kernel=kernel)
    recipe, pool = timed(path, MIXTURE, speedup=speedup)
    kept = pool.choose(saliency(pool, 0), all_open(pool))
    support = kept["experts"]
    layers = [
        replace(layer, expert_intermediate_sizes=tuple(map(int, counts)))
        for layer, counts in zip(widths_of(MIXTURE).dense_layers, support.sum(2), strict=True)
    ]
    assert all(width % 16 == 0 for layer in layers for width in layer.expert_intermediate_sizes or ())
    predicted, _, _ = read_profile(path).speedup(layers, recipe.workload)
    assert speedup <= predicted < speedup * 1.01
    assert shown(pool, kept, path, recipe) == pytest.approx(predicted)
    closed = pool.close(saliency(pool, 0), all_open(pool), pool.keep_ratio)["experts"]  # and already during the search
    assert float(closed.float().mean()) == pytest.approx(float(support.float().mean()), abs=0.02)


@pytest.mark.parametrize(("mixture", "counts"), [(0.0, 3), (1e-4, 3), (1e-3, 1)])
def test_layers_have_as_few_numbers_of_heads_as_pay(mixture: float, counts: int, tmp_path: Path) -> None:
    """And the speedup is met with what they cost together."""
    config = CONFIG | {"num_hidden_layers": 12}
    path = written(tmp_path, config, mixture=mixture)
    recipe, pool = timed(path, config, speedup=1.4)
    importance = {kind: values + 0.2 for kind, values in saliency(pool, 0).items()}
    importance["attn"] *= 100
    for kept in (pool.choose(importance, all_open(pool)), pool.close(importance, all_open(pool), pool.keep_ratio)):
        widths = kept_widths(kept)
        assert len({layer.num_kv_heads for layer in widths} - {0}) == counts
        predicted, _, _ = read_profile(path).speedup(widths, recipe.workload)
        assert recipe.speedup <= predicted < recipe.speedup * 1.04
        assert shown(pool, kept, path, recipe) == pytest.approx(predicted)


def test_a_block_is_removed_as_a_whole_where_it_does_not_pay_its_fixed_cost(tmp_path: Path) -> None:
    """Removing single units would leave a narrow MLP that still has its fixed cost."""
    _, pool = timed(written(tmp_path), speedup=1.2)
    importance = {kind: values + 0.5 for kind, values in saliency(pool, 0).items()}
    importance["attn"] *= 256  # a head is as important as the channels that take as long
    importance["mlp"][2] *= 1e-3
    importance["attn"][1] *= 1e-3
    support = pool.choose(importance, all_open(pool))
    assert not support["mlp"][2].any() and not support["attn"][1].any()


@pytest.mark.parametrize("speedup", [1.1, 1.25, 1.5])
def test_the_search_closes_what_the_final_selection_removes(speedup: float, tmp_path: Path) -> None:
    """Single channels of a block save no time: closed in the search, they would be reopened at the end.

    Along the whole schedule, with attention of very different importance: 19 of 60 such searches reopened blocks.
    """
    config = CONFIG | {"num_hidden_layers": 8}
    _, pool = timed(written(tmp_path, config), config, speedup=speedup)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        importance, is_open = saliency(pool, seed), all_open(pool)
        importance["attn"] *= 400 * torch.rand(1, generator=generator) * torch.rand(8, 1, generator=generator) ** 2
        for step in range(40):
            closed = pool.close(importance, is_open, seams.keep_schedule((step + 1) / 40, pool.keep_ratio))
            assert all((closed[kind] <= is_open[kind]).all() for kind in closed)
            is_open = closed
        final = pool.choose(importance, is_open)
        assert all(torch.equal(final[kind], is_open[kind]) for kind in final)
        assert all(layer.intermediate_size % pool.blocks["mlp"] == 0 for layer in kept_widths(is_open))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speedup": 3.0}, "2.78 is the most"),
        ({"speedup": 2.7}, "where the least that can be kept is"),
        ({"scope": "layer"}, "leave scope out"),
    ],
)
def test_impossible_speedups_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=words):
        timed(written(tmp_path), **changes)


@pytest.mark.usefixtures("cache", "no_pictures")
def test_models_meet_the_speedups_stated(tiny_model: Path, tiny_experts: Path, tiny_text: Path, tmp_path: Path) -> None:
    for model, speedups, multiple in ((tiny_model, (1.1, 1.2), 16), (tiny_experts, (1.01,), 1)):
        profile = written(tmp_path, json.loads((model / "config.json").read_text()), multiple)
        options = ["--profile", profile, "--other-machine", "--context-length", "256", *SMALL, "--steps", "20"]
        options += ["--speedup", ",".join(map(str, speedups)), "--data", tiny_text]
        output = tmp_path / f"out{multiple}"
        passed(invoke("prune", model, *options, "-o", output))
        for speedup in speedups:
            checkpoint = read_checkpoint(output / f"speedup-{speedup}" if len(speedups) > 1 else output)
            workload = Recipe(model="m", speedup=2.0, context_length=256).workload
            predicted, _, _ = read_profile(profile).speedup(checkpoint.layers, workload)
            stated = checkpoint.provenance["latency"]["speedup"]
            assert speedup <= stated < 1.05 * speedup and stated == pytest.approx(predicted)
            card = (checkpoint.folder / "README.md").read_text()
            assert model != tiny_model or f"**predicted**: {stated:.2f}" in card
            assert "vLLM with --quantization fp8" in card  # which the profile was measured with
            for layer in checkpoint.layers:
                widths = layer.expert_intermediate_sizes or (layer.intermediate_size,)
                assert all(width % 16 == 0 for width in widths)
