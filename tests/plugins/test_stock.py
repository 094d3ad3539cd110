"""Pruned folders in a vLLM that has never seen ddp-vllm: no plugin, no package, only the code in the folder."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import NUM_EXPERTS, write_model
from seams import GatedModel, export, load_model, open_source
from serving import Serve, assert_same, job
from test_dense import CHECKPOINTS
from tiny_models import PROMPTS, add_remote_code, edit_weights, generate, make_checkpoint

from ddp_vllm.dimensions import unit_shapes

pytestmark = pytest.mark.vllm

SERVED = ("ragged", "phi3")
AT_NIGHT = (
    "qwen2",
    "gemma2",
    "tied",
    "mistral",
    "qwen3",
    "gemma3",
    "granite",
    "smollm3",
    "seed_oss",
)  # the same code of another family
SPLIT = [  # which divide over two ranks, as they must without the plugin
    {"query_heads_per_kv_head": [3, 3, 3, 3], "intermediate_size": 64},
    {"query_heads_per_kv_head": [2, 2], "intermediate_size": 18},
    {"query_heads_per_kv_head": [1, 1], "intermediate_size": 0},
]
FEWER_EXPERTS, FEWER_AT_NIGHT = ("qwen3_moe",), ("mixtral", "olmoe")
REFUSED = {  # what does not work, and what the user reads
    "old vLLM": r"layer 0 has 1 query and 1 KV heads, vLLM's attention has 12 and 4: .* vLLM 0.30 or newer",
    "missing weight": r"layer 4 lacks the tensors of self_attn.k_proj",
}


def make_fewer_experts(folder: Path, dense: Path) -> dict[str, Any]:
    """Write a dense model without some of its whole experts.

    Returns what the dense model generates whose routers and experts are masked.
    """
    source = open_source(str(dense))
    gates = torch.rand(unit_shapes(source.sizes, "expert")["experts"]) + 0.5
    for row in gates:
        row[torch.randperm(NUM_EXPERTS)[5:]] = 0.0
    export(source, {"experts": gates}, folder, head_unit="expert", provenance={})
    gated = GatedModel(load_model(source, "float32"), source.widths, source.sizes, "expert")
    with gated.masks({"experts": gates}):
        return {"outputs": [generate(gated.model, prompt) for prompt in PROMPTS]}


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> set[str]:
    """The names of the models that the selected tests compare: no engine starts for another."""
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return {case["name"] for case in cases if "name" in case}


@pytest.fixture(scope="module")
def models(chosen: set[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each folder as the export writes it, and what transformers makes of it."""
    root = tmp_path_factory.mktemp("stock")
    families = [name for name in (*SERVED, *AT_NIGHT) if name in chosen | {"ragged"}]
    made = {name: (root / name, make_checkpoint(root / name, **CHECKPOINTS[name])) for name in families}
    made["split"] = root / "split", make_checkpoint(root / "split", "Llama", SPLIT)
    for folder, _ in made.values():
        add_remote_code(folder)
    for family in chosen & {*FEWER_EXPERTS, *FEWER_AT_NIGHT}:
        dense = write_model(family, root / f"dense-{family}", hidden_size=64)  # which vLLM's CPU kernel takes
        made[family] = root / family, make_fewer_experts(root / family, dense)
    return made


@pytest.fixture(scope="module")
def served(serve: Serve, models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what vLLM did with each, in one process."""
    broken = shutil.copytree(models["ragged"][0], tmp_path_factory.mktemp("broken_stock") / "broken")
    edit_weights(broken, lambda weights: weights.pop("model.layers.4.self_attn.k_proj.weight"))
    jobs = {"two ranks": job(models["split"][0], tensor_parallel_size=2)}  # first: threads survive no fork
    jobs |= {name: job(folder) for name, (folder, _) in models.items()}
    jobs |= {"missing weight": job(broken), "old vLLM": job(models["ragged"][0]) | {"asks_layers": False}}
    for family in jobs.keys() & {*FEWER_EXPERTS, *FEWER_AT_NIGHT}:
        jobs[family]["options"] |= {"model_impl": "vllm", "trust_remote_code": False}
    return serve(jobs, "stock_tiny.py")


@pytest.mark.parametrize(
    "name",
    [*SERVED, *FEWER_EXPERTS]
    + [pytest.param(name, marks=pytest.mark.nightly) for name in (*AT_NIGHT, *FEWER_AT_NIGHT)],
)
def test_stock_vllm_says_what_transformers_and_so_our_plugin_say(
    name: str, served: dict[str, Any], models: dict[str, Any]
) -> None:
    assert_same(served[name], models[name][1])


def test_two_tensor_parallel_ranks(served: dict[str, Any], models: dict[str, Any]) -> None:
    assert_same(served["two ranks"], models["split"][1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_stock_vllm_cannot_serve_is_refused_with_the_reason(name: str, served: dict[str, Any]) -> None:
    assert re.search(REFUSED[name], served[name]["error"]), served[name]
