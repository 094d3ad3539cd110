"""Pruned folders in a vLLM that has never seen ddp-vllm: no plugin, no package, only the code in the folder."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import NUM_EXPERTS, write_model
from commands import cases
from seams import export, gated, open_source
from serving import PROMPTS, Serve, assert_same, job, selected
from test_dense import CHECKPOINTS
from tiny_models import add_remote_code, edit_weights, generate, make_checkpoint

from ddp_vllm.dimensions import unit_shapes

pytestmark = pytest.mark.vllm

DENSE = ("ragged", "phi3", "qwen2", "gemma2", "tied", "mistral", "qwen3", "gemma3", "granite", "smollm3", "seed_oss")
MIXTURES = ("qwen3_moe", "mixtral", "olmoe")
BY_DAY = ("ragged", "phi3", "qwen3_moe")  # the others run the code of another family, two ranks also test_dense
SPLIT = [  # which divide over two ranks, as they must without the plugin
    {"query_heads_per_kv_head": [3, 3, 3, 3], "intermediate_size": 64},
    {"query_heads_per_kv_head": [2, 2], "intermediate_size": 18},
    {"query_heads_per_kv_head": [1, 1], "intermediate_size": 0},
]
REFUSED = {  # what does not work, and what the user reads
    "old vLLM": r"layer 0 has 1 query and 1 KV heads, vLLM's attention has 12 and 4: .* vLLM 0.30 or newer",
    "missing weight": r"layer 4 lacks the tensors of self_attn.k_proj",
}


def make_fewer_experts(folder: Path, dense: Path) -> dict[str, Any]:
    """Write a dense model without some of its whole experts; return what it generates where these are masked."""
    source = open_source(str(dense))
    gates = torch.rand(unit_shapes(source.sizes, "expert")["experts"]) + 0.5
    for row in gates:
        row[torch.randperm(NUM_EXPERTS)[5:]] = 0.0
    export(source, {"experts": gates}, folder, head_unit="expert", provenance={})
    masked = gated(source, "expert")
    with masked.masks({"experts": gates}):
        return {"outputs": [generate(masked.model, prompt) for prompt in PROMPTS]}


@pytest.fixture(scope="module")
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each selected folder as the export writes it, and what transformers makes of it."""
    root, made = tmp_path_factory.mktemp("stock"), dict[str, tuple[Path, dict[str, Any]]]()
    for name in selected(request, "stock", __file__) | {"ragged"}:
        if name in MIXTURES:
            dense = write_model(name, root / f"dense-{name}", hidden_size=64)  # which vLLM's CPU kernel takes
            made[name] = root / name, make_fewer_experts(root / name, dense)
            continue
        settings = {"family": "Llama", "layers": SPLIT} if name == "two ranks" else CHECKPOINTS[name]
        made[name] = root / name, make_checkpoint(root / name, **settings)
        add_remote_code(root / name)
    return made


@pytest.fixture(scope="module")
def served(serve: Serve, models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what vLLM did with each, in one process."""
    broken = shutil.copytree(models["ragged"][0], tmp_path_factory.mktemp("broken_stock") / "broken")
    edit_weights(broken, lambda weights: weights.pop("model.layers.4.self_attn.k_proj.weight"))
    own = {"model_impl": "vllm", "trust_remote_code": False}
    jobs = {name: job(folder, **own if name in MIXTURES else {}) for name, (folder, _) in models.items()}
    if "two ranks" in jobs:
        jobs["two ranks"]["options"]["tensor_parallel_size"] = 2
    jobs |= {"missing weight": job(broken), "old vLLM": job(models["ragged"][0], asks_layers=False)}
    return serve(jobs, "serve stock")


@pytest.mark.parametrize("stock", cases((*DENSE, "two ranks", *MIXTURES), BY_DAY))
def test_stock_vllm_computes_what_transformers_and_so_our_plugin_compute(
    stock: str, served: dict[str, Any], models: dict[str, Any]
) -> None:
    assert_same(served[stock], models[stock][1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_stock_vllm_cannot_serve_is_refused_with_the_reason(name: str, served: dict[str, Any]) -> None:
    assert re.search(REFUSED[name], served[name]["error"]), served[name]
