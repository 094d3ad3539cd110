"""The chain on the real model: masked in transformers = exported through remote code = served by vLLM.

SmolLM2-135M, or the dense model in the folder DDP_VLLM_REAL_MODEL, with random gates: whole blocks removed, widths that
are not multiples of 8, scales away from 1. Mild ones: a model that random cuts have broken amplifies rounding, and
nothing could be said to 1e-4.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddp_benchmarks.engine import Server
from ddp_benchmarks.processes import group_members
from ddp_models.loading import load_model
from ddp_models.source import Source, open_source
from ddp_prune.export import export
from ddp_prune.gates import GatedModel, Masks
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.families import unit_shapes

pytestmark = [pytest.mark.real_model, pytest.mark.vllm]
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time there was a fox who")
NEW_TOKENS = 12
VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # the sampler alone compiles for 15 s (2 cores)
}


def _gates(source: Source) -> Masks:
    generator = torch.Generator().manual_seed(0)
    gates = {}
    for kind, shape in unit_shapes(source.sizes, "kv-group").items():
        alive = torch.rand(shape, generator=generator) < 0.995
        gates[kind] = (0.95 + 0.1 * torch.rand(shape, generator=generator)) * alive
    first, second, third = _emptied(source)
    for layer in (first, second):  # attention gone: alone, and with the MLP
        gates["attn"][layer] = 0
    for layer in (second, third):  # MLP gone: with the attention, and alone
        gates["mlp"][layer] = 0
    return gates


def _emptied(source: Source) -> tuple[int, int, int]:
    return tuple(round(share * source.sizes.num_layers) for share in (0.4, 0.67, 0.9))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def dense(smollm2: Path) -> Path:
    return Path(os.environ.get("DDP_VLLM_REAL_MODEL", smollm2))


@pytest.fixture(scope="module")
def exported(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Source, Masks, Path]]:
    """The dense model in each dtype, its gates, and the pruned folder made of both."""
    folder = tmp_path_factory.mktemp("chain")
    wide = folder / "dense-float32"
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    model.save_pretrained(wide)
    AutoTokenizer.from_pretrained(dense).save_pretrained(wide)
    made = {}
    for dtype, origin in (("float32", wide), ("bfloat16", dense)):
        source = open_source(str(origin))
        gates = _gates(source)
        output = folder / f"pruned-{dtype}"
        export(source, gates, output, head_unit="kv-group", provenance={})
        made[dtype] = (source, gates, output)
    return made


def _masked(source: Source, gates: Masks, ids: list[int]) -> torch.Tensor:
    """Return logits [tokens, V] of the stock dense model with the gates in its hooks."""
    gated = GatedModel(load_model(source, "auto"), source.family, source.sizes, "kv-group")
    with torch.no_grad(), gated.masks(gates):
        return gated.model(torch.tensor([ids])).logits[0].float()


def _ask_vllm(folder: Path, dtype: str, prompts: list[list[int]], tokens: int, top: int, tmp: Path) -> Any:
    request = {"folder": str(folder), "dtype": dtype, "prompts": prompts, "tokens": tokens, "top": top}
    (tmp / "request.json").write_text(json.dumps(request))
    script = Path(__file__).with_name("chain_in_vllm.py")
    command = [sys.executable, str(script), str(tmp / "request.json"), str(tmp / "answer.json")]
    done = subprocess.run(command, env=os.environ | VLLM_ENVIRONMENT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((tmp / "answer.json").read_text())


def test_masked_equals_exported_equals_vllm_in_float32(exported: Any, tmp_path: Path) -> None:
    source, gates, folder = exported["float32"]
    widths = read_checkpoint(folder).layers
    first, _, third = _emptied(source)
    assert not widths[first].num_kv_heads and not widths[third].intermediate_size
    assert any(layer.intermediate_size % 8 for layer in widths)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    served = _ask_vllm(folder, "float32", prompts, NEW_TOKENS, 50, tmp_path)
    for prompt, answer in zip(prompts, served, strict=True):
        ids = prompt + answer["tokens"]
        with torch.no_grad():
            plain = model(torch.tensor([ids])).logits[0]
            generated = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1
            )
        assert (plain - _masked(source, gates, ids)).abs().max() < 1e-4
        assert generated[0, len(prompt) :].tolist() == answer["tokens"]
        for step, logits in enumerate(answer["logits"]):
            expected = plain[len(prompt) + step - 1]
            assert max(abs(expected[int(token)] - value) for token, value in logits.items()) < 1e-4


def test_masked_equals_exported_equals_vllm_in_bfloat16_by_divergence(exported: Any, tmp_path: Path) -> None:
    """bfloat16 keeps 8 bits, so distributions are compared, and bfloat16's own error is the yardstick."""
    source, gates, folder = exported["bfloat16"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPTS[2])["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    (answer,) = _ask_vllm(folder, "bfloat16", [prompt], 4, -1, tmp_path)
    ids = prompt + answer["tokens"]
    with torch.no_grad():
        plain = model(torch.tensor([ids])).logits[0].float()
    exact = _masked(exported["float32"][0], gates, ids)
    own_error = _divergence(exact, _masked(source, gates, ids)).mean()  # of bfloat16, with nothing exported
    assert _divergence(exact, plain).mean() < 2 * own_error + 1e-3
    vllm = torch.full_like(plain[: len(answer["logits"])], -torch.inf)
    for step, logits in enumerate(answer["logits"]):
        vllm[step, [int(token) for token in logits]] = torch.tensor(list(logits.values()))
    assert _divergence(exact[len(prompt) - 1 : -1], vllm).mean() < 2 * own_error + 1e-3


def _divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return KL(p ‖ q) in nats for each row of logits."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def test_vllm_serve_answers_over_http_and_leaves_nothing_running(exported: Any) -> None:
    _, _, folder = exported["float32"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :]
    arguments = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--gpu-memory-utilization", "0.3"]
    with Server(str(folder), arguments=arguments) as server:
        assert "--trust-remote-code" not in server.command
        assert server.complete(PROMPTS[0], max_tokens=NEW_TOKENS) == tokenizer.decode(
            expected, skip_special_tokens=True
        )
        assert list(group_members(server.process.pid))
    assert not list(group_members(server.process.pid))
