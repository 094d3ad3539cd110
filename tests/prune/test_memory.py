"""Fitting a device: checkpointed layers, narrow copies, estimates of memory, and free memory."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from runs import pools_of
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ddp_prune.core import passes as memory
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.learn import learn
from ddp_prune.core.saved import Unsaved
from ddp_prune.core.trainer import Learned
from ddp_prune.core.weights import TrainedWeights, step_seed
from ddp_prune.devices import free_memory
from ddp_prune.fit import MODES, Devices, Fit, SizedModel, fit, held_bytes
from ddp_prune.models.source import Source
from ddp_prune.recipe import Recipe
from ddp_prune.run import Run
from ddp_vllm.families import dimensions_of, family_of

MASKS = MODES[-1]
LAYERS, TOKENS = 6, torch.randint(1, 320, (4, 64), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "attention_dropout": 0.5,
}  # fmt: skip


def _gated(model: PreTrainedModel) -> GatedModel:
    model.requires_grad_(False).eval()
    config = model.config.to_dict()
    return GatedModel(model, family_of(config), dimensions_of(config), "kv-group")


@pytest.fixture(params=["dense", "experts"])
def gated(request: pytest.FixtureRequest) -> GatedModel:
    torch.manual_seed(0)
    if request.param == "dense":
        return _gated(LlamaForCausalLM(LlamaConfig(**SIZES)))
    routing = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return _gated(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **routing)))


@pytest.fixture
def source(gated: GatedModel, tmp_path: Path) -> Source:
    """The gated model as if it were in a folder."""
    model: Any = gated.model
    model.config.dtype = torch.float32
    model.config.save_pretrained(tmp_path)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    return Source(folder=tmp_path, config=model.config.to_dict(), family=gated.family, sizes=gated.sizes, shapes=shapes)


def fitted(source: Source, free: float, **settings: Any) -> tuple[Fit, SizedModel]:
    """Fit masks alone into memory of which so many bytes are free after the model was loaded."""
    recipe = Recipe(model="m", sparsity=0.4, seq_len=64, **settings)
    held = held_bytes(source, MASKS, 4, 1, teacher=False)
    devices = Devices(1, "cpu", held + free, 1)
    return fit(recipe, source, devices, MASKS), SizedModel.of(recipe, source, MASKS, devices)


def test_auto_takes_half_the_sequences_before_it_checkpoints(source: Source) -> None:
    """Half of the free memory is for activations. A number of sequences that the user passed stays."""
    needed = 16 * 64 * fitted(source, 0)[1].activation_bytes()

    def found(free: float, **settings: Any) -> tuple[bool, int]:
        one, _ = fitted(source, free, **settings)
        return one.checkpointed, one.num_sequences

    plenty = 10**12
    assert found(plenty) == (False, 16) and found(plenty, micro_batch_size=3) == (False, 3)
    # enough for what is not an activation, such as the logits
    assert found(2.1 * needed, activation_checkpointing="auto")[0] is False
    assert found(0.9 * needed)[0] and found(1.9 * needed, micro_batch_size=16) == (True, 16)
    assert found(plenty, activation_checkpointing="on") == (True, 16)
    assert not found(0, activation_checkpointing="off")[0]


@pytest.mark.parametrize("setting", ["on", "off"])
def test_fewer_sequences_a_pass_where_memory_is_short(setting: str, source: Source) -> None:
    def fitting(free: float) -> int:
        return fitted(source, free, activation_checkpointing=setting)[0].num_sequences

    assert fitting(10**12) == 16
    needed = fitted(source, 0)[1].pass_bytes(4, setting == "on")
    assert fitting(needed / 0.8 + 2) == 4 and fitting(needed / 0.8 - 2) == 2
    assert fitting(0) == 1
    assert (fitted(source, 0)[1].pass_bytes(4, setting == "off") < needed) == (setting == "off")


def test_8_bit_moments_and_rounding_resume_to_the_bit() -> None:
    """The steps after a save are those of the run that went on, and other seeds round differently."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).eval()
    weights = TrainedWeights(model, Accelerator(cpu=True), optimizer="adamw-8bit")

    def steps(numbers: range, seed: int = 0) -> dict[str, torch.Tensor]:
        for step in numbers:
            model(TOKENS, labels=TOKENS).loss.backward()
            weights.step(1e-3, weights.reduce_gradients(), step_seed(seed, step))
        return {name: each.clone() for name, each in weights.state().items()}

    with torch.compiler.set_stance("force_eager"):
        saved = steps(range(2))
        whole = steps(range(2, 4))
        assert any(name.endswith("q_proj.weight") and "-codes." in name for name in saved)
        for seed, same in ((0, True), (1, False)):
            weights.reset_optimizer()
            for name, value in saved.items():  # as a saved run is read
                if (tensor := weights.like(name)) is not None:
                    tensor.copy_(value)
            weights.restore(2, saved)
            resumed = steps(range(2, 4), seed)
            assert all(torch.equal(resumed[name], whole[name]) for name in whole) is same


def test_a_run_learns_the_same_in_more_passes_and_with_layers_that_run_again(gated: GatedModel) -> None:
    """Gates, saliency and routing counts are equal: nothing is added twice, and dropout stays off."""
    sizes: list[int] = []
    gated.model.model.register_forward_pre_hook(lambda _module, inputs: sizes.append(len(inputs[0])))

    def run(name: str, **settings: Any) -> tuple[Learned, int]:
        sizes.clear()
        recipe = Recipe(model="m", sparsity=0.4, steps=6, batch_size=4, seq_len=64, **settings)
        pools = pools_of(gated, recipe)
        learned = learn(gated, TOKENS, Run.alone(recipe), pools, Accelerator(cpu=True), Unsaved(), lambda _: None)
        return learned, max(sizes)

    (plain, usual), (again, _) = run("off", activation_checkpointing="off"), run("on", activation_checkpointing="on")
    assert usual == 4  # no more than a step has, though 1,024 tokens would be 16
    assert gated.model.config._attn_implementation == "sdpa"  # whatever learning chose
    for kind in gated.shapes:
        assert torch.equal(plain.gates[kind], again.gates[kind]) and torch.equal(plain.z[kind], again.z[kind])
        assert torch.equal(plain.saliency[kind], again.saliency[kind]) and plain.saliency[kind].any()
    for kind, counts in plain.routed.items():
        assert torch.equal(counts, again.routed[kind]) and int(counts.sum()) == 6 * LAYERS * 2 * TOKENS.numel()
    assert run("small passes", micro_batch_size=1)[1] == 1


@pytest.mark.parametrize(("limit", "free"), [("max", 1000), ("700", 500), ("5000", 1000), ("100", 0), (None, 1000)])
def test_free_memory_in_a_container(
    limit: str | None, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also outside of one, and where host and device share it, as accelerate answers on a Mac."""
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("300\n")
        (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 100\n")
    monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path)
    for answer in ({"cpu": 1000}, {"mps": 1000}, {0: 5, "cpu": 1000}):
        monkeypatch.setattr(memory, "get_max_memory", lambda answer=answer: answer)
        assert free_memory(Accelerator(cpu=True)) == free


@pytest.mark.parametrize("method", ["weights", "lora"])
def test_trained_weights_that_are_dropped_leave_memory(method: str) -> None:
    """Steps are timed on a model of their own; a hook of its parameters that held it could not be collected."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    weights = TrainedWeights(model, Accelerator(cpu=True), method)
    alive = weakref.ref(model.lm_head)
    model.get_decoder()(TOKENS, use_cache=False).last_hidden_state.sum().backward()
    assert weights.sums
    del model, weights
    gc.collect()
    assert alive() is None
