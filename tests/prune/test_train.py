"""The loop on a tiny model: repeatable to the bit, resumable, exact in its counts, and it touches no weight."""

import gc
import json
import math
import weakref
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import BLOCKS, STEPS, Lab, assert_same, out_of_memory, saved_in

from ddp_prune.core import batches as batches_module
from ddp_prune.core import gates as gates_module
from ddp_prune.core import loop as train_module
from ddp_prune.core import trainer as trainer_module
from ddp_prune.core.gates import GatedModel, GatedProjection, _Scale, block_losses
from ddp_prune.core.loss import perplexity_of
from ddp_prune.core.trainer import PRIOR_PRECISION, Learned, natural_step
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import open_source
from ddp_prune.recipe import AlmSettings
from ddp_prune.run_folder import SizeFolder
from ddp_vllm.errors import TrainingError


@pytest.fixture
def lab(tiny_model: Path, tmp_path: Path) -> Lab:
    return Lab(tiny_model, tmp_path, "query-head")


def assert_near(first: Learned, second: Learned, distance: float) -> None:
    """The same support, and scales within that distance."""
    for kind, gates in first.gates.items():
        assert torch.equal(gates > 0, second.gates[kind] > 0)
        torch.testing.assert_close(gates, second.gates[kind], atol=distance, rtol=0)


VARIANTS: list[dict[str, Any]] = [
    {}, {"scope": "layer", "polish": 0.0, "distillation": 0.0}, {"controller": "alm", "scope": "layer"},
]  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_counts_are_exact_and_a_run_repeats_to_the_bit(changes: dict[str, Any], lab: Lab) -> None:
    before = {name: value.clone() for name, value in lab.gated.model.state_dict().items()}
    first, second = lab.run("first", **changes), lab.run("second", **changes)
    assert_same(first, second)
    after = lab.gated.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in lab.gated.model.parameters())
    for kind, kept in (("attn", 14), ("mlp", 173)):  # round(0.6·3·8) and round(0.6·3·96)
        gates = first.gates[kind]
        alive = gates > 0
        assert int(alive.sum()) == kept and gates.dtype == torch.float32
        assert gates[alive].min() >= 0.05 and not gates[~alive].any()
        assert (gates[alive] != 1).any()  # something was learned
        if changes.get("scope") == "layer":
            counts = alive.sum(1).tolist()
            assert max(counts) - min(counts) <= 1
        rounding, raw_alive = first.rounding[kind], first.z[kind] > 0
        assert rounding["raw_sparsity"] == pytest.approx(1 - raw_alive.float().mean().item())
        assert rounding["dropped"] == int((raw_alive & ~alive).sum())
        assert rounding["revived"] == int((alive & ~raw_alive).sum())
        if changes.get("controller") != "alm":  # the search itself ends on the budget, to a unit a row
            assert rounding["revived"] + rounding["dropped"] <= (6 if changes.get("scope") == "layer" else 1)


def test_raw_masks_are_those_of_the_search(lab: Lab) -> None:
    """However many stay; neither rounded to the budget nor lifted to 0.05."""
    alm = AlmSettings(raw_masks=True, gate_floor=-0.1, learning_rate=0.3)
    learned = lab.run("raw", controller="alm", polish=0.0, alm=alm)
    for kind, gates in learned.gates.items():
        assert torch.equal(gates, learned.z[kind]) and (gates >= 0).all()
        assert learned.rounding[kind]["raw_sparsity"] == pytest.approx(1 - (gates > 0).float().mean().item())
    kept = torch.cat([gates.flatten() for gates in learned.gates.values()])
    assert int((kept > 0).sum()) != 14 + 173 and kept[kept > 0].min() < trainer_module.KEPT_FLOOR


@pytest.mark.parametrize(("align", "kept"), [(36, 144), (96, 96)])
def test_aligned_widths_are_multiples_at_the_largest_count_below_the_budget(align: int, kept: int, lab: Lab) -> None:
    """Of 173 channels in layers of 96, which 36 does not divide; heads are not aligned."""
    for scope in ("global", "layer"):
        learned = lab.run(scope, align=align, scope=scope)
        widths = (learned.gates["mlp"] > 0).sum(1)
        assert int(widths.sum()) == kept and not (widths % align).any()
        assert int((learned.gates["attn"] > 0).sum()) == 14
    assert int(widths.max() - widths.min()) <= align  # in every layer alike


def test_alignment_polishes_the_support_it_chose(lab: Lab) -> None:
    plain, aligned = lab.run("plain"), lab.run("aligned", align=32)
    assert torch.equal(plain.z["mlp"], aligned.z["mlp"])  # the search does not know of it
    revived = (aligned.gates["mlp"] > 0) & (plain.z["mlp"] == 0)
    assert revived.any() and not plain.gates["mlp"][revived].any()
    scales = aligned.gates["mlp"][revived]
    assert (scales != 1).all() and (scales > 0.3).all()  # they moved on from the scales they had


@pytest.mark.parametrize(("stop", "controller"), [(3, "gradual"), (5, "alm"), (8, "alm"), (11, "gradual")])
def test_an_interrupted_run_resumes_to_the_same_gates(stop: int, controller: str, lab: Lab) -> None:
    """Stops right after a save, between saves, at the end of the search, and in the polish."""
    resumed, steps = lab.interrupted_run(stop, controller=controller)
    assert_same(resumed, lab.run("whole", controller=controller))
    assert steps == [*range(1, stop + 1), *range(stop // 3 * 3 + 1, STEPS + 1)]
    lines = (lab.folder / "broken.run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


def test_a_run_is_saved_by_time_and_no_more_often_than_saving_costs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of the test's own: a step takes 50 s, a save 1 s, later 10 s."""
    saves, now, cost = list[int](), [0.0], [1.0]

    def save(_run: SizeFolder, step: int, *_: Any) -> None:
        saves.append(step)
        now[0] += cost[0]

    def report(_metrics: dict[str, float]) -> None:
        now[0] += 50.0

    monkeypatch.setattr(SizeFolder, "save", save)
    lab.run("out", save_every=5)
    assert saves == [5, 10, STEPS]  # the last one too: an export can fail
    saves.clear()
    monkeypatch.setattr(train_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    lab.run("cheap", report, save_every=0)
    assert saves == [4, 7, 10, STEPS]  # two minutes after the last one
    saves.clear()
    cost[0] = 10.0
    lab.run("dear", report, save_every=0)
    assert saves == [4, 8, STEPS]  # 200 s after the last one


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_good_masks(lab: Lab) -> None:
    at = 10  # in the polish

    def poison(metrics: dict[str, float]) -> None:
        if metrics["step"] == at:
            lab.gated.model.model.norm.weight.data[0] = float("nan")

    with pytest.raises(TrainingError) as caught:
        lab.run("out", poison)
    message = str(caught.value)
    assert f"nan at step {at + 1}" in message and str(lab.folder / "out.run") in message and "\n" not in message
    with saved_in(lab.folder / "out", lab.recipe()) as progress:
        saved = progress.resume(lambda _: None)
    assert saved is not None
    step, tensors, _ = saved
    assert step == at // 3 * 3
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert tensors["z.mlp"].shape == (3, 96)


def test_a_run_that_ran_out_of_memory_resumes_with_what_it_was_told_to_try(lab: Lab) -> None:
    """3 does not divide the 4 sequences of a step."""
    expected, steps = lab.run("whole", micro_batch_size=4), list[float]()

    def run_out(metrics: dict[str, float]) -> None:
        if metrics["step"] == 6:
            hook.append(lab.gated.model.model.norm.register_forward_pre_hook(out_of_memory))

    hook: list[Any] = []
    told = r"ran out of memory at step 7; .*out\.run.*micro_batch_size = 1"
    with pytest.raises(TrainingError, match=told) as caught:
        lab.run("out", run_out, micro_batch_size=4)
    assert "\n" not in str(caught.value)
    hook[0].remove()
    smaller = {"micro_batch_size": 3, "activation_checkpointing": "on"}
    learned = lab.run("out", lambda metrics: steps.append(metrics["step"]), **smaller)
    assert steps == list(range(7, STEPS + 1))
    assert_near(learned, expected, 1e-3)


def test_the_teacher_is_computed_once_per_block_where_its_states_fit(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 blocks of 16 tokens with 64 float32 each are read in three passes; 10 blocks, 4 a step, end within a step."""
    learned = []
    for room, forwards in ((16 * 16 * 64 * 4 - 1, 2 * STEPS), (16 * 16 * 64 * 4, STEPS + 4)):
        monkeypatch.setattr(batches_module, "TEACHER_CACHE_BYTES", room)
        learned.append(lab.run(f"{room}", blocks=BLOCKS[:16], micro_batch_size=4))
        assert lab.forwards == forwards
    assert_same(*learned)
    cached = lab.run("cached", blocks=BLOCKS[:10])  # cached and new blocks meet in one micro-batch
    monkeypatch.setattr(batches_module, "TEACHER_CACHE_BYTES", 0)
    assert_near(cached, lab.run("plain", blocks=BLOCKS[:10]), 1e-4)


def test_natural_steps_by_the_true_curvature_end_at_the_mode_of_the_posterior() -> None:
    """Of f/2·(z − x)² for one x after another: their mean with 1, which weighs as the prior and 20 more x do."""
    generator = torch.Generator().manual_seed(0)
    curvature, seen = torch.tensor([0.01, 1.0, 300.0]), torch.rand(50, 3, generator=generator) * 3
    z, information = torch.ones(3), torch.zeros(3)
    for number, x in enumerate(seen, 1):
        information = information + curvature
        z = natural_step(z, curvature * (z - x), information, torch.tensor(20 / number))
    prior = PRIOR_PRECISION + 20 * curvature
    torch.testing.assert_close(z, (prior + curvature * seen.sum(0)) / (prior + 50 * curvature))
    assert abs(z[0] - 1) < 0.1 < abs(z[2] - 1)  # what hardly matters stays near 1


@pytest.mark.parametrize(("sparsity", "closed"), [(0.4, 10), (0.9, 22)])
def test_layers_keep_their_share_until_a_whole_head_of_it_is_gone(sparsity: float, closed: int, lab: Lab) -> None:
    """Of 8 heads a layer 4.8 and 0.8 stay: 14 and 2 of all 24, not 12 and none."""
    learned = lab.run("out", sparsity=sparsity, scope="layer")
    assert learned.rounding["attn"] == {"raw_sparsity": pytest.approx(closed / 24), "revived": 0, "dropped": 0}


def test_channels_that_are_not_computed_change_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short all are computed: the same support, scales within what other sums round to."""
    widths: dict[str, list[int]] = {"attn": [], "mlp": []}
    weights_at = GatedProjection.weights_at

    def note(self: GatedProjection, kept: torch.Tensor) -> Any:
        widths[self.projection.block].append(len(kept))
        return weights_at(self, kept)

    monkeypatch.setattr(GatedProjection, "weights_at", note)
    monkeypatch.setattr(gates_module, "CHANNEL_BLOCK", 8)
    narrow = lab.run("narrow")
    assert min(widths["mlp"]) < 64 and not any(width % 8 for width in widths["mlp"])
    assert widths["attn"] and max(widths["attn"]) < 4  # KV heads
    monkeypatch.setattr(trainer_module, "narrow_layers", lambda *_: None)
    computed = len(widths["mlp"])
    assert_near(narrow, lab.run("whole"), 1e-4)
    assert len(widths["mlp"]) == computed


def test_perplexity_is_that_of_plain_transformers_and_of_a_broken_model_infinite(lab: Lab) -> None:
    model: Any = lab.gated.model
    with torch.no_grad():
        losses = [model(tokens[None], labels=tokens[None]).loss.item() for tokens in BLOCKS[:5]]
    found = perplexity_of(block_losses(lab.gated, None, BLOCKS[:5]))
    assert found == pytest.approx(math.exp(fmean(losses)), rel=1e-4)
    assert perplexity_of([1e4]) == perplexity_of([math.nan]) == math.inf


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_gated_model_is_freed_with_its_last_reference(kind: str, tiny_model: Path, tiny_experts: Path) -> None:
    """No hook makes a cycle, which would hold the weights until a collection, maybe after the next model is loaded."""
    source = open_source(str(tiny_model if kind == "dense" else tiny_experts))
    model = load_model(source, "float32")
    gated = GatedModel(model, source.family, source.sizes, "auto" if kind == "experts" else "query-head")
    with gated.masks({name: torch.ones(shape) for name, shape in gated.shapes.items()}):
        model(torch.ones(1, 4, dtype=torch.int64))
    freed = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        del gated, model
        assert [reference() for reference in freed if reference() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("columns", [1, 3])
def test_scaling_sums_each_token_and_squares_it(columns: int) -> None:
    """Against autograd, with a mask of its own for every token."""
    generator = torch.Generator().manual_seed(0)
    x, slope = torch.randn(2, 2, 5, 4 * columns, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, generator=generator, dtype=torch.float64)
    each = mask.expand(2, 5, 4).clone().requires_grad_()
    (x * each.repeat_interleave(columns, -1) * slope).sum().backward()
    leaf, inputs, squares = mask.clone().requires_grad_(), x.clone().requires_grad_(), torch.zeros(4).double()
    (_Scale.apply(inputs, leaf, columns, squares, None) * slope).sum().backward()
    assert each.grad is not None and leaf.grad is not None
    torch.testing.assert_close(leaf.grad, each.grad.sum((0, 1)))
    torch.testing.assert_close(squares, each.grad.square().sum((0, 1)))
    torch.testing.assert_close(inputs.grad, slope * mask.repeat_interleave(columns))
