"""`ddp-vllm quantize`: what llm-compressor makes of a pruned model, served by the plugin, against its definition."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import Result
from commands import assert_refused, invoke, passed, write_lines
from safetensors.torch import load_file
from seams import leave_unquantized, open_model
from seams import load_model as load_eval_model
from serving import Serve, job
from tiny_models import GROUP, PROMPTS, RAGGED_LAYERS, generate, load_model, make_checkpoint, state_quantization
from torch import nn

from ddp_vllm.masks import METRICS_FILE, RECOVERY_FILE

PACKAGES = Path(sys.prefix) / "quantize"  # llm-compressor, by `make install`
FP8_TOP, INT8_TOP = 448.0, 127  # largest numbers of float8_e4m3 and of int8
MADE = """
import sys
import ddp_vllm
root = sys.argv[1]
ddp_vllm.quantize(f"{root}/ragged", "FP8_DYNAMIC", output=f"{root}/FP8")
ddp_vllm.quantize(f"{root}/aligned", "W4A16", output=f"{root}/W4A16")
ddp_vllm.quantize(f"{root}/ragged", "W8A8", output=f"{root}/W8A8")
"""
ALIGNED_LAYERS = [  # every input and output a multiple of 32, as the INT4 kernel for CPUs requires
    {"query_heads_per_kv_head": [3, 1], "intermediate_size": 32},
    {"query_heads_per_kv_head": [], "intermediate_size": 0},
    {"query_heads_per_kv_head": [2], "intermediate_size": 64},
]


def quantize(folder: Path, scheme: str, output: Path) -> Result:
    return invoke("quantize", folder, "--scheme", scheme, "-o", output)


def test_what_no_kernel_takes_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """It names layers, one projection and the cure, if there is one."""
    make_checkpoint(tmp_path / "ragged", "Llama", RAGGED_LAYERS, hidden_size=96)
    words = "layers 1, 4, 5: mlp.gate_proj of layer 1 is 17 × 96, and both must be multiples of 32; prune the dense"
    assert_refused(quantize(tmp_path / "ragged", "W4A16", tmp_path / "out"), 2, words, "again with --align 32")
    make_checkpoint(tmp_path / "heads", "Llama", ALIGNED_LAYERS, hidden_size=96, head_dim=16)
    assert_refused(
        quantize(tmp_path / "heads", "W4A16", tmp_path / "out"), 2, "--align does not change the size of heads"
    )
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "Llama", RAGGED_LAYERS)
    assert_refused(quantize(tmp_path / "plain", "FP8_DYNAMIC", tmp_path / "plain"), 5, "this command reads")
    result = quantize(tmp_path / "plain", "W8A8", tmp_path / "out")
    assert_refused(result, 2, "llm-compressor is not installed; install it in a separate environment")
    assert result.stdout.startswith("layers 1, 4, 5 have widths that are not multiples of 16, ")
    make_checkpoint(tmp_path / "int8", "Llama", RAGGED_LAYERS)
    state_quantization(tmp_path / "int8", tiny_models.ROWS_OF_INT8)
    assert_refused(quantize(tmp_path / "int8", "FP8_DYNAMIC", tmp_path / "out"), 7, "is quantized already")
    assert not (tmp_path / "out").exists()


def test_a_recovered_model_keeps_the_records_of_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From which `report` draws its curves."""
    make_checkpoint(tmp_path / "plain", "Llama", RAGGED_LAYERS)
    for name in (METRICS_FILE, RECOVERY_FILE):
        write_lines(tmp_path / "plain" / name, [{"step": 1, "loss": 2.0}])
    leave_unquantized(monkeypatch)
    passed(quantize(tmp_path / "plain", "W8A8", tmp_path / "out"))
    for name in (METRICS_FILE, RECOVERY_FILE):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "plain" / name).read_text()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the plain models and of what each scheme made of them."""
    if not PACKAGES.exists():
        pytest.skip("llm-compressor is missing; run make install")
    root = tmp_path_factory.mktemp("quantized")
    make_checkpoint(root / "ragged", "Llama", RAGGED_LAYERS)
    make_checkpoint(root / "aligned", "Llama", ALIGNED_LAYERS, hidden_size=96)
    path = os.pathsep.join([str(PACKAGES), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", MADE, str(root)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def reference(root: Path, scheme: str) -> Any:
    """Return the plain model in transformers with the rounded weights, and activations rounded as the scheme says."""
    model = load_model(root / ("aligned" if scheme == "W4A16" else "ragged"))
    saved = load_file(root / scheme / "model.safetensors")
    for name, module in model.model.named_modules(prefix="model"):
        if not isinstance(module, nn.Linear):
            continue
        scale = saved[f"{name}.weight_scale"].float()
        if scheme == "W4A16":
            weight = (
                tiny_models.unpack(saved[f"{name}.weight_packed"]).unflatten(-1, (-1, GROUP)) * scale[..., None]
            ).flatten(-2)
        else:
            weight = saved[f"{name}.weight"].float() * scale
            module.register_forward_pre_hook(_as_integers if scheme == "W8A8" else _as_floats)
        assert (weight - module.weight).abs().max() < 0.08 * module.weight.abs().max()  # else it is another weight
        module.weight.data = weight
    return model


def _as_integers(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    scale = inputs[0].abs().amax(-1, keepdim=True).clamp_min(1e-10) / INT8_TOP
    return (inputs[0] / scale).round().clamp(-INT8_TOP - 1, INT8_TOP) * scale


def _as_floats(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    scale = inputs[0].abs().amax(-1, keepdim=True).clamp_min(1e-10) / FP8_TOP
    return (inputs[0] / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.fixture(scope="module")
def served(made: Path, serve: Serve) -> dict[str, Any]:
    types = {"W8A8": "float32", "FP8": "bfloat16", "W4A16": "bfloat16"}
    return serve({scheme: job(made / scheme, dtype=dtype) for scheme, dtype in types.items()})


# vLLM's int8 products saturate without VNNI instructions, and its wheel has no 4-bit kernel for such a processor
OLD_CPU = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's kernel requires AVX-512")


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scheme", "tolerance"),
    [pytest.param("W8A8", 0.05, marks=OLD_CPU), ("FP8", 0.3), pytest.param("W4A16", 0.06, marks=OLD_CPU)],
)
def test_the_plugin_computes_what_the_scheme_says(scheme: str, tolerance: float, made: Path, served: Any) -> None:
    """Other weights are off by 1. An activation next to a rounding's edge may fall to either side."""
    assert "error" not in served[scheme], served[scheme]
    if scheme == "W8A8":
        assert served[scheme]["mlp_widths"] == [17, 64, 1, 33]  # not padded
    model = reference(made, scheme)
    for prompt, output in zip(PROMPTS, served[scheme]["outputs"], strict=True):
        assert output["logprobs"] == pytest.approx(tiny_models.score(model, prompt, output["tokens"]), abs=tolerance)
    if scheme == "W8A8":
        assert served[scheme]["outputs"][0]["tokens"] == generate(model, PROMPTS[0])["tokens"]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # of compressed-tensors
@pytest.mark.parametrize(("scheme", "tolerance"), [("W8A8", 0.1), ("FP8", 1e-5), ("W4A16", 1e-5)])
def test_eval_rounds_weights_and_activations(scheme: str, tolerance: float, made: Path) -> None:
    """compressed-tensors divides by 127.5 where vLLM's INT8 kernels divide by 127."""
    dense = SimpleNamespace(sizes=None, shapes={})
    found = load_eval_model(open_model(str(made / scheme), dense), "float32")  # type: ignore[arg-type]
    wanted = reference(made, scheme)
    for prompt in PROMPTS:
        logits, expected = (model(torch.tensor([prompt])).logits for model in (found, wanted))
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
