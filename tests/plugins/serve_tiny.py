"""Run real vLLM on checkpoints, one engine after the other in this process, and write down what each did.

Several ranks are processes forked from it.
Usage: serve_tiny.py KIND JOBS.json RESULTS.json; a job holds the arguments of the function that KINDS has for a kind.
"""

import gc
import json
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import vllm.config.vllm
from safetensors.torch import load_file
from serving import NUM_NEW_TOKENS, PROMPTS
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.plugins import load_general_plugins
from vllm.transformers_utils import model_arch_config_convertor as convertors

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 192,
    "skip_tokenizer_init": True,
    "gpu_memory_utilization": 0.3,  # of main memory; by default vLLM wants nearly all of it free
    "kv_cache_memory_bytes": 1 << 30,  # stated, so that no warm-up finds it out
    "num_gpu_blocks_override": 16,  # of it: to fill a GiB takes longer than all else
}


def serve(
    folder: str,
    options: dict[str, Any],
    num_tokens: int = NUM_NEW_TOKENS,
    prompts: Sequence[list[int]] = PROMPTS,
    adapters: Sequence[str | None] = (),
    updates: Sequence[str] = (),
    compiled: bool = False,
) -> dict[str, Any]:
    """Ask all prompts once, then once more for each adapter (None: without one) and after each of `updates`.

    updates: "reload", all weights from disk, or "pieces", tensor by tensor, the masks among them.
    compiled: let torch compile what vLLM asks it to.
    """
    torch.compiler.set_stance("default" if compiled else "force_eager")
    engine = LLM(folder, **{**DEFAULTS, **options})
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]

    def ask(request: LoRARequest | None = None) -> list[dict[str, Any]]:
        answers = [answer.outputs[0] for answer in engine.generate(inputs, greedy, lora_request=request)]
        return [{"tokens": list(answer.token_ids), "logprobs": chosen_logprobs(answer)} for answer in answers]

    def ask_adapter(number: int, adapter: str | None) -> dict[str, Any]:
        request = adapter and LoRARequest(adapter, number, adapter)
        try:
            if request:
                engine.llm_engine.add_lora(request)
        except Exception as error:  # the test looks at the message
            return {"error": f"{type(error).__name__}: {error}"}
        return {"outputs": ask(request or None)}

    def ask_updated(update: str) -> list[dict[str, Any]]:
        with uninitialized_memory_is_nan():
            if update == "reload":
                engine.collective_rpc("reload_weights")
            else:
                engine.apply_model(partial(load_in_pieces, folder=Path(folder)))
        engine.reset_prefix_cache()
        return ask()

    return {
        "outputs": ask(),
        "updated": {update: ask_updated(update) for update in updates},
        "adapted": [ask_adapter(number, adapter) for number, adapter in enumerate(adapters, 1)],
        "counters": {} if engine.llm_engine.log_stats is False else counters(engine),
        "attention_layers": sorted(engine.llm_engine.vllm_config.compilation_config.static_forward_context),
        "expert_bytes": engine.apply_model(expert_bytes),
        "cache_scales": engine.apply_model(cache_scales)[0],
        "mlp_widths": engine.apply_model(mlp_widths)[0],
    }


def serve_stock(folder: str, options: dict[str, Any], asks_layers: bool = True) -> dict[str, Any]:
    """Serve without ddp-vllm, through vLLM's Transformers backend.

    asks_layers: off, vLLM takes the heads of all layers for the dense model's, as old versions do.
    """
    kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    answer = {} if asks_layers else {"get_per_layer_hf_configs": lambda self: None}
    base = convertors.ModelArchConfigConvertorBase
    convertors.MODEL_ARCH_CONFIG_CONVERTORS[kind] = type("Convertor", (base,), answer)
    return serve(folder, {"model_impl": "transformers", "trust_remote_code": True} | options)


def plan(
    folder: str, options: dict[str, Any], capability: int | None = None, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Let vLLM plan up to where it would load weights, so a GPU can be pretended.

    capability: first number of the GPU's compute capability; None: this machine.
    """
    from ddp_plugins import limits

    number = SimpleNamespace(major=capability, minor=0)
    gpu = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: number)
    with (
        patch.object(limits, "current_platform", gpu if capability else limits.current_platform),
        patch.object(vllm.config.vllm, "HAS_TRITON", True),  # as on a GPU, or V2 is refused
        patch.dict(os.environ, environment or {}),
    ):
        engine = EngineArgs(folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", **options)
        engine.create_engine_config()
    return {}


@contextmanager
def uninitialized_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def load_in_pieces(model: torch.nn.Module, folder: Path) -> None:
    """Update a model as vLLM's weight transfer does between rollouts: a call for each tensor."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

    masks = {f"{kind}.{name}": torch.ones(3, 5) for kind in ("attn", "mlp", "experts") for name in ("gates", "z")}
    initialize_layerwise_reload(model)
    for name, tensor in (masks | load_file(folder / "model.safetensors")).items():
        model.load_weights([(name, tensor)])  # type: ignore[operator]
    finalize_layerwise_reload(model, SimpleNamespace(dtype=next(model.parameters()).dtype))


def counters(engine: LLM) -> dict[str, float]:
    """Return what vLLM counted, such as `vllm:prefix_cache_hits`."""
    return {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}


def expert_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of routed experts that one rank holds; vLLM calls it in its workers."""
    return sum(parameter.nbytes for name, parameter in model.named_parameters() if ".routed_experts." in name)


def cache_scales(model: Any) -> dict[str, list[float]]:
    """Return the scales of query, keys and values in the KV cache of each attention of this rank."""
    return {
        name: [module._q_scale_float, module._k_scale_float, module._v_scale_float]
        for name, module in model.named_modules()
        if hasattr(module, "_k_scale_float")
    }


def mlp_widths(model: Any) -> list[int]:
    """Return the channels of every MLP that vLLM built on this rank, without those of experts."""
    layers = [module for name, module in model.named_modules() if name.endswith("mlp.down_proj")]
    return [getattr(layer, "base_layer", layer).input_size_per_partition for layer in layers]  # LoRA wraps layers


def chosen_logprobs(answer: Any) -> list[float]:
    return [chosen[token].logprob for token, chosen in zip(answer.token_ids, answer.logprobs, strict=True)]


def skip_inspection(folders: Iterable[Path] = ()) -> None:
    """Hand vLLM all classes: to look at one that it knows by name, it would import itself in a new process."""
    from ddp_plugins.register import model_class
    from ddp_vllm.remote_code.configuration_ddp import CONFIGS

    load_general_plugins()
    for folder in folders:
        for name in json.loads((folder / "config.json").read_text()).get("architectures") or ():
            with suppress(ImportError, KeyError):  # vLLM reports what is missing
                ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    for config in CONFIGS:
        loaded = pkgutil.resolve_name(model_class(config))
        ModelRegistry.register_model(loaded.__name__, loaded)


def num_ranks(job: dict[str, Any]) -> int:
    options = job["options"]
    return options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)


def run_jobs(jobs: list[dict[str, Any]], run: Callable[..., dict[str, Any]]) -> list[Any]:
    """Return what `run` returns of each job, or its error."""
    results: dict[int, Any] = {}
    for number in sorted(range(len(jobs)), key=lambda number: -num_ranks(jobs[number])):  # threads survive no fork
        gc.freeze()  # what earlier jobs imported, which each of an engine's collections would look at
        start = time.perf_counter()
        try:
            results[number] = run(**jobs[number])
        except Exception as error:  # the test looks at the message
            results[number] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        cleanup_dist_env_and_memory()
        print(f"{jobs[number]['folder']}: {time.perf_counter() - start:.1f} s", flush=True)
    return [results[number] for number in range(len(jobs))]


KINDS = {"serve": serve, "serve stock": serve_stock, "plan": plan}

if __name__ == "__main__":
    kind, jobs_file, results_file = sys.argv[1:]
    all_jobs = json.loads(Path(jobs_file).read_text())
    if kind == "serve stock":  # nothing of ddp-vllm can help, which an editable install would make importable
        sys.modules.update(dict.fromkeys(("ddp_vllm", "ddp_prune", "ddp_plugins", "ddp_benchmarks")))
        os.environ["VLLM_PLUGINS"] = ""
    else:
        skip_inspection(Path(job["folder"]) for job in all_jobs)
    Path(results_file).write_text(json.dumps(run_jobs(all_jobs, KINDS[kind])))
