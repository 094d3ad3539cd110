"""Mixtures of experts: what `prune` wrote is computed alike by transformers, with and without our package, and vLLM.

Also the memory and the number formats of experts, on models that were cut by hand.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_families import EXPERT_WIDTHS, load
from any_models import MIXTURES, NUM_EXPERTS, SIZES, write_model
from commands import invoke, passed
from core_fixtures import tiny_model, tiny_text  # noqa: F401  # fixtures
from seams import GatedModel, load_model, open_source, read_masks
from serving import UPDATES, VLLM, Serve, assert_same, assert_same_outputs, job
from test_stock_classes import difference
from tiny_models import PROMPTS, edit_config, generate, score

from ddp_plugins import moe_cpu_rows
from ddp_plugins.moe_reference import round_to_fp8
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.remote_code.configuration_ddp_widths import register_widths

pytestmark = pytest.mark.vllm
ROUTERS = "model_executor/layers/fused_moe/router"
HAS_CPU_ROUTER = VLLM is not None and (Path(str(VLLM.origin)).parent / ROUTERS / "cpu_router.py").exists()
served = pytest.mark.skipif(not HAS_CPU_ROUTER, reason="this vLLM runs no experts but its own on a CPU")
SHORT = (
    *("--sparsity", "0.4", "--budget", "params", "--steps", "6", "--batch-size", "2", "--seq-len", "16"),
    *("--train", "masks", "--learning-rate", "2e-4", "--heldout-blocks", "2"),
)
WAYS: dict[str, dict[str, Any]] = {  # how else one is served; each rank has a part of every expert, or some experts
    "two tensor-parallel ranks": {"tensor_parallel_size": 2},
    "two expert-parallel ranks": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
FP8 = {  # vLLM's FP8 for linear layers rounds activations too; on CPUs without AMX it has no kernel per tensor
    "a scale per matrix": {
        "dtype": "float16",
        "quantization": "online",
        "quantization_config": {"moe": "fp8_per_tensor"},
    },
    "a scale per output": {
        "dtype": "float16",
        "quantization": "online",
        "quantization_config": {"moe": "fp8_per_channel"},
    },
    "linear layers too": {"dtype": "bfloat16", "quantization": "fp8_per_channel"},
}
BY_DAY = ("qwen3_moe", "mixtral", "deepseek_v2")
FAMILIES = [pytest.param(name, marks=[pytest.mark.nightly] * (name not in BY_DAY)) for name in MIXTURES]
ADAPTED = {"adapted attention": ["qkv_proj", "o_proj"], "o_proj left out": ["qkv_proj"]}
BFLOAT16 = "bfloat16"  # the CPU's own kernel, where it suits the processor
PLAIN = """
import sys
for name in ("ddp_vllm", "ddp_prune", "ddp_plugins", "ddp_benchmarks"):
    sys.modules[name] = None  # an editable install would make them importable
import torch
from transformers import AutoModelForCausalLM
with torch.no_grad():
    for folder in sys.argv[1:]:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
        torch.save(model(torch.arange(5, 37)[None]).logits, folder + "/logits.pt")
"""


@pytest.fixture(scope="session")
def pruned(
    tiny_model: Path,  # noqa: F811
    tiny_text: Path,  # noqa: F811
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, dict[str, Any], torch.Tensor]]:
    """Each folder that `prune` wrote; what the masked dense model generates, and its logits of some tokens."""
    root, folders = tmp_path_factory.mktemp("mixtures"), {}
    cases = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = {case["name"] for case in cases if isinstance(case.get("name"), str)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_VLLM_CACHE", str(root / "cache"))
        patch.setattr("seams.evaluation_module.SAMPLE_TOKENS", 2)
        patch.setattr("ddp_vllm.pages.written.write_report", lambda *_: None)
        for name in (name for name in MIXTURES if name in chosen | {*BY_DAY}):
            dense, folder = write_model(name, root / f"dense-{name}"), root / name
            for file in tiny_model.glob("tokenizer*"):
                (dense / file.name).write_bytes(file.read_bytes())
            passed(invoke("prune", dense, *SHORT, "--data", tiny_text, "-o", folder))
            source, (gates, _) = open_source(str(dense)), read_masks(folder / MASKS_FILE)
            gated = GatedModel(load_model(source, "float32"), source.widths, source.sizes, "auto")
            with gated.masks(gates), torch.no_grad():
                logits = gated.model(torch.arange(5, 37)[None]).logits
                folders[name] = folder, {"outputs": [generate(gated.model, prompt) for prompt in PROMPTS]}, logits
    folder = folders["mixtral"][0]  # with code of its own, which stays unused: the plugin brings what is needed
    (folder / "evil.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n")
    return folders


@pytest.fixture(scope="session")
def adapter(made: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """An adapter of attention, and what transformers and peft generate with it."""
    from peft import LoraConfig, get_peft_model

    register_widths()
    torch.manual_seed(1)
    config = LoraConfig(target_modules=["q_proj", "o_proj"], r=4, lora_alpha=8, init_lora_weights=False)
    model, folder = get_peft_model(load(made("mixtral") / "narrow"), config).eval(), tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder, {"outputs": [generate(model, prompt) for prompt in PROMPTS]}


@pytest.fixture(scope="session")
def one_process(
    serve: Serve, pruned: dict[str, Any], made: Callable[[str], Path], adapter: tuple[Path, Any]
) -> dict[str, Any]:
    """Return what vLLM did with every folder."""
    # first: threads survive no fork
    jobs = {name: job(made("mixtral") / "narrow", **options) for name, options in WAYS.items()}
    jobs |= {name: job(folder) for name, (folder, *_) in pruned.items()}
    for name, targets in ADAPTED.items():
        lora = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": targets}
        jobs[name] = job(made("mixtral") / "narrow", **lora) | {"adapters": [str(adapter[0])]}
    jobs["mixtral narrow"] = job(made("mixtral") / "narrow") | {"updates": UPDATES}
    for name, options in ({BFLOAT16: {"dtype": "bfloat16"}} | FP8).items():
        jobs[name] = {**job(made("qwen3_moe") / "narrow", **options), "updates": UPDATES}
    return serve(jobs)


def test_transformers_without_our_package(pruned: dict[str, Any], tmp_path: Path) -> None:
    """By the code in the folder, of all in one process."""
    edit_config(pruned["mixtral"][0], lambda config: config["auto_map"].setdefault("AutoModel", "evil.Model"))
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PLAIN, *(str(folder) for folder, *_ in pruned.values())]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for folder, _, logits in pruned.values():
        torch.testing.assert_close(torch.load(folder / "logits.pt"), logits, atol=1e-5, rtol=0)


@served
@pytest.mark.parametrize("name", FAMILIES)
def test_vllm_computes_what_the_masked_dense_model_computes(name: str, one_process: Any, pruned: Any) -> None:
    folder, reference, _ = pruned[name]
    assert_same(one_process[name], reference)
    assert difference(one_process[name], reference) < 1e-5
    assert not (folder / "ran").exists()


@served
@pytest.mark.parametrize("way", WAYS)
def test_other_ways_compute_the_same(way: str, one_process: Any, answers: Any) -> None:
    assert_same(one_process[way], answers("mixtral", "zeroed"))
    assert difference(one_process[way], answers("mixtral", "zeroed")) < 1e-5


@served
@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_answers_as_in_peft_or_is_refused(name: str, one_process: Any, adapter: Any) -> None:
    """vLLM alone would ignore the parts for modules that get no LoRA."""
    (result,) = one_process[name]["adapted"]
    if "o_proj" in ADAPTED[name]:
        assert_same_outputs(result["outputs"], adapter[1]["outputs"])
    else:
        assert re.search(r"changes model.layers.\d.self_attn.o_proj, to which no LoRA is applied", result["error"])


@served
@pytest.mark.parametrize("update", UPDATES)
def test_updated_weights_are_those_of_the_checkpoint(update: str, one_process: Any, answers: Any) -> None:
    """Memory that vLLM allocates for them is poisoned with NaN; the masks among the pieces are left out."""
    assert_same_outputs(one_process["mixtral narrow"]["updated"][update], answers("mixtral", "zeroed")["outputs"])


@served
@pytest.mark.parametrize("way", ["mixtral narrow", *WAYS])
def test_experts_are_loaded_as_kept_plus_their_alignment(way: str, one_process: Any) -> None:
    """All ranks together hold no more than one does."""
    rows = SIZES["num_hidden_layers"] * sum(-(-width // 16) * 16 for width in EXPERT_WIDTHS)
    assert sum(one_process[way]["expert_bytes"]) == rows * 3 * 48 * 4  # gate, up and down in fp32


@served
def test_bfloat16_is_near_and_stays_the_same_when_updated(one_process: Any, answers: Any) -> None:
    result = one_process[BFLOAT16]
    for got, expected in zip(result["outputs"], answers("qwen3_moe", "zeroed")["outputs"], strict=True):
        assert got["tokens"][0] == expected["tokens"][0]
        assert got["logprobs"][0] == pytest.approx(expected["logprobs"][0], abs=0.05)
    for update in UPDATES:
        assert_same_outputs(result["updated"][update], result["outputs"])
    if moe_cpu_rows.kernel():
        assert result["expert_bytes"] == [ROWS * 3 * SIZES["hidden_size"] * 2]


ROWS = 2 * sum(-(-width // 16) * 16 for width in EXPERT_WIDTHS)  # of two layers with experts


@served
@pytest.mark.parametrize("name", FP8)
def test_fp8_experts_compute_what_their_rounded_weights_compute(name: str, one_process: Any, made: Any) -> None:
    """The same after an update. The folder stays unquantized."""
    result = one_process[name]
    assert "error" not in result, result
    for update in UPDATES:
        assert_same_outputs(result["updated"][update], result["outputs"])
    scales = 2 * ROWS + 2 * NUM_EXPERTS * SIZES["hidden_size"]
    assert result["expert_bytes"] == [ROWS * 3 * SIZES["hidden_size"] + 4 * scales]
    if name == "linear layers too":
        return
    model = load(made("qwen3_moe") / "narrow")
    for module_name, module in model.named_modules():
        if re.search(r"\.experts\.\d", module_name) and isinstance(module, torch.nn.Linear):
            weight = module.weight.data.half()
            module.weight.data = round_to_fp8(weight, per_tensor=name == "a scale per matrix").float()
    for prompt, output in zip(PROMPTS, result["outputs"], strict=True):
        assert output["logprobs"] == pytest.approx(score(model, prompt, output["tokens"]), abs=0.05)
