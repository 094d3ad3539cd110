"""The loop on tiny models: exact counts, repeatable to the bit, resumable, and no weight is touched.

Also every schedule with its values, and the paper's equations as properties (section 3 and appendix of
arXiv:2603.08065).
"""

import math
from pathlib import Path
from typing import Any

import pytest
import seams
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from seams import BLOCKS, STEPS, WARMUP, Lab, Learned, Recipe, assert_same, gate, learn_module, rate_of, retention_score
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ddp_vllm.errors import TrainingError

pytestmark = pytest.mark.slow

IDLE = (0, 7)  # layer and number of an expert that no token is ever sent to


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of two layers with 8 experts of 24 channels; the layer between them is dense."""
    folder = tmp_path_factory.mktemp("moe")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=64, intermediate_size=40, moe_intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        mlp_only_layers=[1], norm_topk_prob=True, eos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    dense = Qwen3MoeForCausalLM(config)
    router = dense.model.layers[0].mlp.gate.weight.data
    router[4], router[6], router[7] = -router[3], -router[5], 0.0  # of each pair one scores above 0: they are the two
    dense.save_pretrained(folder)
    return folder


@pytest.fixture
def lab(tiny_model: Path, tmp_path: Path) -> Lab:
    return Lab(tiny_model, tmp_path, "query-head")


@pytest.fixture
def routed(mixture: Path, tmp_path: Path) -> Lab:
    return Lab(mixture, tmp_path, "auto")


def assert_near(first: Learned, second: Learned, distance: float) -> None:
    """The same support, and scales within that distance."""
    for kind, gates in first.gates.items():
        assert torch.equal(gates > 0, second.gates[kind] > 0)
        torch.testing.assert_close(gates, second.gates[kind], atol=distance, rtol=0)


DENSE, MIXTURE = {"attn": 14, "mlp": 173}, {"experts": 230}  # 0.6 of 3·8, 3·96 and 2·8·24
VARIANTS: list[tuple[dict[str, int], dict[str, Any]]] = [  # kept units, settings
    (DENSE, {}), (DENSE, {"scope": "layer", "polish": 0.0, "distillation": 0.0}),
    (DENSE, {"controller": "alm", "scope": "layer"}),
    (MIXTURE, {}), (MIXTURE, {"scope": "layer"}), (MIXTURE, {"controller": "alm", "scope": "expert"}),
]  # fmt: skip


@pytest.mark.parametrize(("kept", "changes"), VARIANTS, ids=str)
def test_counts_are_exact_and_a_run_repeats_to_the_bit(
    kept: dict[str, int], changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    lab: Lab = request.getfixturevalue("lab" if kept is DENSE else "routed")
    before = {name: value.clone() for name, value in lab.gated.model.state_dict().items()}
    first, second = lab.run("first", **changes), lab.run("second", **changes)
    assert_same(first, second)
    after = lab.gated.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in lab.gated.model.parameters())
    assert first.gates.keys() == kept.keys()
    for kind, gates in first.gates.items():
        alive = gates > 0
        assert int(alive.sum()) == kept[kind] and gates.dtype == torch.float32
        assert gates[alive].min() >= 0.05 and not gates[~alive].any()
        assert (gates[alive] != 1).any()  # something was learned
        if (scope := changes.get("scope", "global")) != "global":
            counts = alive.sum(-1) if scope == "expert" else alive.flatten(1).sum(1)
            assert counts.max() - counts.min() <= 1
        rounding, raw_alive = first.rounding[kind], first.z[kind] > 0
        assert rounding["raw_sparsity"] == pytest.approx(1 - raw_alive.float().mean().item())
        assert rounding["dropped"] == int((raw_alive & ~alive).sum())
        assert rounding["revived"] == int((alive & ~raw_alive).sum())
        if changes.get("controller") != "alm":  # the search itself ends on the budget, to a unit a row
            assert rounding["revived"] + rounding["dropped"] <= (6 if changes.get("scope") == "layer" else 1)
    assert kept is DENSE or first.routed["experts"].sum(1).tolist() == [STEPS * 4 * 16 * 2] * 2


def test_learning_beats_chance(routed: Lab) -> None:
    """The same four sequences in every step, so that losses can be compared."""
    seen: list[dict[str, float]] = []
    learned = routed.run("out", seen.append, blocks=BLOCKS[:4], steps=120, sparsity=0.5, polish=0.5)
    support = learned.gates["experts"] > 0
    shuffled = support.flatten()[torch.randperm(support.numel(), generator=torch.Generator().manual_seed(1))]
    with torch.no_grad(), routed.gated.masks({"experts": shuffled.view_as(support).float()}):
        chance = float(routed.gated.model(BLOCKS[:4], labels=BLOCKS[:4]).loss)
    assert seen[-1]["ce"] < seen[60]["ce"] - 0.1 and seen[-1]["ce"] < chance - 0.5


def test_an_expert_that_never_fires_is_not_pruned_for_that(routed: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = routed.run("fair")
    assert learned.routed["experts"][IDLE] == 0 and int((learned.routed["experts"] == 0).sum()) == 1
    assert int((learned.gates["experts"][IDLE] > 0).sum()) > 0.7 * 24
    assert (learned.z["experts"][IDLE] > 0.5).all()
    monkeypatch.setattr(learn_module, "neutral_where_idle", lambda saliency, _: saliency)
    assert not routed.run("unfair").gates["experts"][IDLE].any()  # without our rule it would be the first to go


def test_raw_masks_are_those_of_the_search(lab: Lab) -> None:
    """However many stay; neither rounded to the budget nor lifted to 0.05."""
    alm = seams.AlmSettings(raw_masks=True, gate_floor=-0.1, learning_rate=0.3)
    learned = lab.run("raw", controller="alm", polish=0.0, alm=alm)
    for kind, gates in learned.gates.items():
        assert torch.equal(gates, learned.z[kind]) and (gates >= 0).all()
        assert learned.rounding[kind]["raw_sparsity"] == pytest.approx(1 - (gates > 0).float().mean().item())
    kept = torch.cat([gates.flatten() for gates in learned.gates.values()])
    assert int((kept > 0).sum()) != 14 + 173 and kept[kept > 0].min() < learn_module.KEPT_FLOOR


def test_aligned_widths_are_multiples_at_the_largest_count_below_the_budget(lab: Lab) -> None:
    """Of 173 channels in layers of 96, which 36 does not divide. The support is polished from the scales it had."""
    plain, revived_scales = lab.run("plain"), list[torch.Tensor]()
    for align, kept, scope in ((36, 144, "global"), (36, 144, "layer"), (96, 96, "global")):
        learned = lab.run(f"{align}{scope}", align=align, scope=scope)
        widths = (learned.gates["mlp"] > 0).sum(1)
        assert int(widths.sum()) == kept and not (widths % align).any()
        assert scope == "global" or int(widths.max() - widths.min()) <= align  # in every layer alike
        assert int((learned.gates["attn"] > 0).sum()) == 14  # heads are not aligned
        if scope == "global":
            assert torch.equal(plain.z["mlp"], learned.z["mlp"])  # the search does not know of it
            revived = (learned.gates["mlp"] > 0) & (plain.z["mlp"] == 0)
            revived_scales.append(learned.gates["mlp"][revived])
    scales = torch.cat(revived_scales)
    assert len(scales) and (scales != 1).all() and (scales > 0.3).all()


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_good_masks(lab: Lab) -> None:
    def poison(metrics: dict[str, float]) -> None:
        if metrics["step"] == 10:  # in the polish
            lab.gated.model.model.norm.weight.data[0] = float("nan")

    with pytest.raises(TrainingError, match=r"^[^\n]*nan at step 11[^\n]*$") as caught:
        lab.run("out", poison)
    assert str(lab.folder / "out.run") in str(caught.value)
    with seams.saved_in(lab.folder / "out", lab.recipe()) as progress:
        saved = progress.resume(lambda _: None)
    assert saved and saved.step == 9 and all(tensor.isfinite().all() for tensor in saved.tensors.values())


def test_a_run_that_ran_out_of_memory_resumes_with_what_it_was_told_to_try(lab: Lab) -> None:
    """3 does not divide the 4 sequences of a step."""
    expected, steps, hook = lab.run("whole", micro_batch_size=4), list[float](), list[Any]()

    def run_out(metrics: dict[str, float]) -> None:
        if metrics["step"] == 6:
            hook.append(lab.gated.model.model.norm.register_forward_pre_hook(seams.out_of_memory))

    told = r"^[^\n]*ran out of memory at step 7; [^\n]*out\.run[^\n]*micro_batch_size = 1[^\n]*$"
    with pytest.raises(TrainingError, match=told):
        lab.run("out", run_out, micro_batch_size=4)
    hook[0].remove()
    smaller = {"micro_batch_size": 3, "activation_checkpointing": "on"}
    learned = lab.run("out", lambda metrics: steps.append(metrics["step"]), **smaller)
    assert steps == list(range(7, STEPS + 1))
    assert_near(learned, expected, 1e-3)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_layers_that_run_again_and_smaller_passes_learn_the_same(kind: str, lab: Lab, routed: Lab) -> None:
    """Gates, saliency and routing counts are equal: nothing is added twice, and dropout stays off."""
    made = lab if kind == "dense" else routed
    sizes: list[int] = []
    for layer in made.gated.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    made.gated.model.model.register_forward_pre_hook(lambda _module, inputs: sizes.append(len(inputs[0])))
    plain = made.run("off", activation_checkpointing="off")
    assert max(sizes) == 4  # no more than a step has
    assert made.gated.model.config._attn_implementation == "sdpa"  # whatever learning chose
    assert_same(plain, made.run("on", activation_checkpointing="on"))
    sizes.clear()
    assert_near(plain, made.run("small passes", micro_batch_size=1), 1e-3)
    assert max(sizes) == 1


def test_the_teacher_is_computed_once_per_block_where_its_states_fit(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 blocks of 16 tokens with 64 float32 each are read in three passes; 10 blocks, 4 a step, end within a step."""
    learned = []
    for room, forwards in ((16 * 16 * 64 * 4 - 1, 2 * STEPS), (16 * 16 * 64 * 4, STEPS + 4)):
        monkeypatch.setattr(seams.batches_module, "TEACHER_CACHE_BYTES", room)
        learned.append(lab.run(f"{room}", blocks=BLOCKS[:16], micro_batch_size=4))
        assert lab.forwards == forwards
    assert_same(*learned)
    cached = lab.run("cached", blocks=BLOCKS[:10])  # cached and new blocks meet in one micro-batch
    monkeypatch.setattr(seams.batches_module, "TEACHER_CACHE_BYTES", 0)
    assert_near(cached, lab.run("plain", blocks=BLOCKS[:10]), 1e-4)


def test_masks_learn_from_the_cross_entropy_of_the_loss_mask(lab: Lab) -> None:
    """This holds for any micro-batches, although their sequences have unequally many tokens in the loss mask."""
    shares = torch.linspace(0, 0.6, 4).repeat(16)[:, None]
    loss_mask = torch.rand(BLOCKS.shape, generator=torch.Generator().manual_seed(0)) < shares
    scores = seams.logits(lab.gated.model, BLOCKS[:4])
    losses = F.cross_entropy(scores[:, :-1].transpose(1, 2), BLOCKS[:4, 1:], reduction="none")
    wanted, moved = losses[loss_mask[:4, 1:]].mean().item(), []
    for size in (1, 4):
        trainer = lab.trainer(loss_mask, micro_batch_size=size)
        assert trainer.step(0)["ce"] == pytest.approx(wanted, rel=1e-5)
        moved.append(trainer.gates.z["mlp"])
    torch.testing.assert_close(moved[0], moved[1], atol=1e-5, rtol=0)
    everything = lab.trainer()
    everything.step(0)
    assert not torch.allclose(everything.gates.z["mlp"], moved[0], atol=1e-3)


def test_text_outside_the_loss_mask_changes_neither_information_nor_scales(lab: Lab) -> None:
    """A step on four sequences equals one on these four and twelve others whose tokens are all masked out."""
    loss_mask, steps = torch.zeros(BLOCKS.shape, dtype=torch.bool), []
    loss_mask[:4] = True
    for size in (4, 16):
        trainer = lab.trainer(loss_mask, batch_size=size, distillation=0.0)
        trainer.step(0)
        steps.append(trainer.gates)
    for kind in steps[0].z:
        torch.testing.assert_close(steps[0].information[kind], steps[1].information[kind], rtol=1e-3, atol=1e-8)
        torch.testing.assert_close(steps[0].z[kind], steps[1].z[kind], rtol=1e-4, atol=1e-5)


def test_schedules_have_these_values() -> None:
    """Gates close on a quadratic that ends at 85 % of the search; weights rise for a tenth and fall along a cosine."""
    values = [seams.keep_schedule(progress, 0.6) for progress in (0.0, 0.25, 0.5, 0.85, 1.0)]
    assert values == pytest.approx([1.0, 0.799308, 0.667820, 0.6, 0.6], abs=1e-6)
    assert seams.keep_schedule(0.0, 0.4, start=0.6) == pytest.approx(0.6)  # a size that starts where another ended
    assert (WARMUP, seams.BETAS, seams.LARGEST_GRADIENT) == (0.1, (0.9, 0.95), 1.0)
    rates = [rate_of(step, 100, 1.0, WARMUP) for step in (0, 5, 9, 10, 55, 99)]
    assert rates == pytest.approx([1 / 11, 6 / 11, 10 / 11, 1.0, 0.5, 0.000305], abs=1e-6)
    assert rate_of(59, 100, 1.0, WARMUP, flat_until=60) == 1.0  # of a size family, until its search ends
    assert rate_of(80, 100, 1.0, WARMUP, flat_until=60) == pytest.approx(0.5)
    # Eq. 14: from 0.5 to 0.05 with the root of the progress
    assert [seams.sharpness_at(progress, 0.5, 0.05) for progress in (0.0, 0.25, 1.0)] == pytest.approx(
        [0.5, 0.275, 0.05]
    )
    run = seams.Run.alone(Recipe(model="m", sparsity=0.2, controller="alm", polish=0.0, steps=100)).schedule
    cosine = 0.5 * (1 + math.cos(math.pi * 47 / 95))
    assert [seams.learning_rate(step, run, 2e-2) for step in (0, 4, 52)] == pytest.approx([4e-3, 2e-2, 2e-2 * cosine])
    sizes = [Recipe(model="m", sparsity=sparsity, steps=100) for sparsity in (0.1, 0.2, 0.4)]
    assert seams.steps_of(sizes) == [(0, 16, 37), (16, 32, 53), (32, 65, 86)]
    assert seams.steps_of(sizes[:1]) == [(0, 65, 100)]


def test_natural_steps_by_the_true_curvature_end_at_the_mode_of_the_posterior() -> None:
    """Of f/2·(z − x)² for one x after another: their mean with 1, which weighs as the prior and 20 more x do."""
    moved = seams.natural_step(
        torch.ones(3), torch.tensor([10.0, 10.0, -10.0]), torch.tensor([0.0, 50.0, 50.0]), torch.tensor([0.0, 0.0, 1.0])
    )
    assert moved.tolist() == pytest.approx([1 - 10 / 50, 1 - 10 / 100, 1 + 10 / 150])
    generator = torch.Generator().manual_seed(0)
    curvature, seen = torch.tensor([0.01, 1.0, 300.0]), torch.rand(50, 3, generator=generator) * 3
    z, information = torch.ones(3), torch.zeros(3)
    for number, x in enumerate(seen, 1):
        information = information + curvature
        z = seams.natural_step(z, curvature * (z - x), information, torch.tensor(20 / number))
    prior = seams.PRIOR_PRECISION + 20 * curvature
    torch.testing.assert_close(z, (prior + curvature * seen.sum(0)) / (prior + 50 * curvature))
    assert abs(z[0] - 1) < 0.1 < abs(z[2] - 1)  # what hardly matters stays near 1


def test_gradients_of_weights_are_clipped_to_norm_1() -> None:
    """AdamW's first step does not depend on the gradient's size, its second moment does."""
    config: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    weights = seams.TrainedWeights(
        LlamaForCausalLM(LlamaConfig(**config, num_attention_heads=2)), Accelerator(cpu=True)
    )
    weights.sums = {name: torch.ones_like(master) for name, master in weights.masters.items()}
    norm = weights.reduce_gradients()
    assert norm == pytest.approx(math.sqrt(sum(master.numel() for master in weights.masters.values())), rel=1e-6)
    weights.step(1e-3, norm)
    second = next(iter(weights.optimizer.state.values()))["exp_avg_sq"]
    assert float(second.flatten()[0]) == pytest.approx(0.05 / norm**2, rel=1e-4)


@pytest.mark.parametrize("mu", [0.01, 0.05, 0.3, 0.5, 1.0])
def test_the_gradient_of_the_score_passes_its_clamp(mu: float) -> None:
    """Inside (0, 2μ) it is the true derivative; outside, where the true one is 0, it still pulls."""
    z = torch.rand(640, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 * mu - mu
    leaf = z.clone().requires_grad_()
    retention_score(leaf, mu).sum().backward()
    assert leaf.grad is not None and (leaf.grad > 0).all()
    inside = (z > 0.05 * mu) & (z < 1.95 * mu)
    difference = 1e-5 * mu
    numeric = (retention_score(z + difference, mu) - retention_score(z - difference, mu)) / (2 * difference)
    torch.testing.assert_close(leaf.grad[inside], numeric[inside], rtol=1e-5, atol=0)


UNITS = 20
COST = torch.linspace(0.0015, 0.03, UNITS)[torch.randperm(UNITS, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("kept", [5, 15])
def test_the_papers_multipliers_recover_the_exact_budget_and_the_best_support(kept: int) -> None:
    """Σ c_k (m_k − 1)² under the paper's penalty, rates and 1,000 steps: the best answer keeps the dearest P at scale
    1; the theorem's hypotheses, margin and binarisation, are met."""
    z = nn.Parameter(torch.ones(1, UNITS))
    alm = seams.AugmentedLagrangian({"mlp": kept / UNITS})
    rates = [(z, 2e-2, False), (alm.lambda1["mlp"], 2e-2, True), (alm.lambda2["mlp"], 4e-1, True)]
    rates.append((alm.lambda3["mlp"], 2e-2, True))
    optimizer = torch.optim.AdamW(
        [{"params": [values], "lr": rate, "maximize": up} for values, rate, up in rates], weight_decay=0.0
    )
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    for step in range(1000):
        mu = seams.sharpness_at((step + 1) / 1000, 0.5, 0.05)
        optimizer.zero_grad()
        penalty = alm({"mlp": retention_score(z, mu)}, {"mlp": torch.ones(1, UNITS)})
        ((COST * (gate(z) - 1).square()).sum() + penalty).backward()
        optimizer.step()
        cosine.step()
        z.data.clamp_(min=0.0)
    scores, found = retention_score(z.detach(), mu).sum().item(), z.detach()[0]
    alive = gate(found) > 0
    assert int(alive.sum()) == kept and scores == pytest.approx(kept, abs=1e-3)
    assert COST[alive].min() > COST[~alive].max()
    assert found[alive].min() >= 2 * 0.05  # the margin at which s is exactly 1
    regret = (COST * (gate(found) - 1).square()).sum() / COST[~alive].sum()
    assert regret.item() == pytest.approx(1.0, abs=2e-3)
