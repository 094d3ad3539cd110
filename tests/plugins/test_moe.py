"""Mixtures of experts: what `prune` wrote is computed alike by transformers, with and without our package, and vLLM.

Also the number formats of experts, on models that were cut by hand.
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
from commands import cases, invoke, passed, quick_commands
from core_fixtures import tiny_model, tiny_text  # noqa: F401  # fixtures
from runs import edit_config
from safetensors.torch import load_file
from seams import gated, open_source, read_masks
from serving import PROMPTS, UPDATES, Serve, assert_same, assert_same_outputs, difference, job, selected
from tiny_models import generate, score

from ddp_plugins import moe_cpu_rows
from ddp_plugins.moe_reference import round_to_fp8
from ddp_vllm.checkpoint import read_config
from ddp_vllm.masks import MASKS_FILE

pytestmark = pytest.mark.vllm
SHORT = (
    *("--sparsity", "0.4", "--budget", "params", "--steps", "6", "--batch-size", "2", "--seq-len", "16"),
    *("--train", "masks", "--heldout-blocks", "2"),
)
BY_DAY = ("qwen3_moe", "mixtral", "deepseek_v2")
BFLOAT16 = "bfloat16"  # the CPU's own kernel, where it suits the processor
ONLINE = {"dtype": "float16", "quantization": "online"}
FP8 = {  # vLLM's FP8 for linear layers rounds activations too; on CPUs without AMX it has no kernel per tensor
    "a scale per matrix": ONLINE | {"quantization_config": {"moe": "fp8_per_tensor"}},
    "a scale per output": ONLINE | {"quantization_config": {"moe": "fp8_per_channel"}},
    "linear layers too": {"dtype": "bfloat16", "quantization": "fp8_per_channel"},
}
ROWS = 2 * sum(-(-width // 16) * 16 for width in EXPERT_WIDTHS)  # of two layers with experts

# loads, saves, loads again and trains pruned folders without our packages; arguments: where to save, folders
ALONE = """
import sys
from pathlib import Path
for name in ("ddp_vllm", "ddp_prune", "ddp_plugins", "ddp_benchmarks"):
    sys.modules[name] = None  # an editable install would make them importable
import torch
from transformers import AutoModelForCausalLM
tokens = torch.arange(5, 37)[None]
for folder in map(Path, sys.argv[2:]):
    saved = Path(sys.argv[1], folder.name)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(tokens).logits
        model.save_pretrained(saved)
        again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()  # registered for this process
        assert torch.equal(again(tokens).logits, logits)
    torch.save({"class": type(model).__module__, "logits": logits}, saved / "logits.pt")
    half = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    exact = half._keep_in_fp32_modules_strict or ()  # newer versions keep the router so
    other = {name for name, parameter in half.named_parameters() if parameter.dtype != torch.bfloat16}
    assert all(any(kept in name for kept in exact) for name in other)
    model.train()(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if ".experts." in name)
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
    with quick_commands(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_VLLM_CACHE", str(root / "cache"))
        for name in (name for name in MIXTURES if name in selected(request, "name", __file__) | {*BY_DAY}):
            dense, folder = write_model(name, root / f"dense-{name}"), root / name
            for file in tiny_model.glob("tokenizer*"):
                (dense / file.name).write_bytes(file.read_bytes())
            passed(invoke("prune", dense, *SHORT, "--data", tiny_text, "-o", folder))
            masked, (gates, _) = gated(open_source(str(dense))), read_masks(folder / MASKS_FILE)
            with masked.masks(gates), torch.no_grad():
                logits = masked.model(torch.arange(5, 37)[None]).logits
                folders[name] = folder, {"outputs": [generate(masked.model, prompt) for prompt in PROMPTS]}, logits
    folder = folders["mixtral"][0]  # with code of its own, which stays unused: the plugin brings what is needed
    (folder / "evil.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n")
    return folders


@pytest.fixture(scope="session")
def served(serve: Serve, pruned: dict[str, Any], made: Callable[[str], Path]) -> dict[str, Any]:
    """Return what vLLM did with every folder, in one process."""
    jobs = {name: job(folder) for name, (folder, *_) in pruned.items()}
    for name, options in ({BFLOAT16: {"dtype": "bfloat16"}} | FP8).items():
        jobs[name] = job(made("qwen3_moe") / "narrow", updates=UPDATES, **options)
    return serve(jobs)


def test_transformers_without_our_package(pruned: dict[str, Any], tmp_path: Path) -> None:
    """Stock classes load by the code in the folder, are saved with their widths, and can be trained."""
    edit_config(pruned["mixtral"][0], lambda config: config["auto_map"].setdefault("AutoModel", "evil.Model"))
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ALONE, tmp_path, *(str(folder) for folder, *_ in pruned.values())]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, (folder, _, logits) in pruned.items():
        saved = tmp_path / folder.name
        result = torch.load(saved / "logits.pt")
        torch.testing.assert_close(result["logits"], logits, atol=1e-5, rtol=0)
        stated, again = (read_config(place) for place in (folder, saved))
        assert again["quantization_config"] == stated["quantization_config"]
        if name in BY_DAY:  # the class of DeepSeek's first version is ours
            assert result["class"].startswith("transformers.models.") and "auto_map" not in again
        before, after = (load_file(place / "model.safetensors") for place in (folder, saved))
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", cases(MIXTURES, BY_DAY))
def test_vllm_computes_what_the_masked_dense_model_computes(name: str, served: Any, pruned: Any) -> None:
    folder, reference, _ = pruned[name]
    assert_same(served[name], reference)
    assert difference(served[name], reference) < 1e-5
    assert not (folder / "ran").exists()


def test_bfloat16_is_near_and_stays_the_same_when_updated(served: Any, answers: Any) -> None:
    result = served[BFLOAT16]
    for got, expected in zip(result["outputs"], answers("qwen3_moe", "zeroed")["outputs"], strict=True):
        assert got["tokens"][0] == expected["tokens"][0]
        assert got["logprobs"][0] == pytest.approx(expected["logprobs"][0], abs=0.05)
    for update in UPDATES:
        assert_same_outputs(result["updated"][update], result["outputs"])
    if moe_cpu_rows.kernel():
        assert result["expert_bytes"] == [ROWS * 3 * SIZES["hidden_size"] * 2]


@pytest.mark.parametrize("name", FP8)
def test_fp8_experts_compute_what_their_rounded_weights_compute(name: str, served: Any, made: Any) -> None:
    """The same after an update. The folder stays unquantized."""
    result = served[name]
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
