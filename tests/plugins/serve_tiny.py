"""Run real vLLM on checkpoints, one engine after the other in this process, and write down what each did.

A process of its own: vLLM's warnings, global state and compiled functions stay out of the test process.
Usage: serve_tiny.py JOBS.json RESULTS.json; a job holds the arguments of `serve`.
"""

import json
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_models import NUM_NEW_TOKENS, PROMPTS, expert_bytes, mlp_widths
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.plugins import load_general_plugins

from ddp_plugins.register import model_class
from ddp_vllm.remote_code.configuration_ddp import CONFIGS

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 192,
    "skip_tokenizer_init": True,
    "gpu_memory_utilization": 0.3,  # of main memory; by default vLLM wants nearly all of it free
    "num_gpu_blocks_override": 16,  # to fill a KV cache of a GiB takes longer than all else
}


def serve(
    folder: str,
    options: dict[str, Any],
    logprobs: int | None = 0,
    num_tokens: int = NUM_NEW_TOKENS,
    adapters: Sequence[str | None] = (),
    updates: Sequence[str] = (),
) -> dict[str, Any]:
    """Ask all prompts once, then once more for each adapter (None: without one) and after each of `updates`.

    logprobs: 0 for those of the chosen tokens; None for none, which saves the sampler 15 s of compilation.
    updates: "reload", all weights from disk, or "pieces", tensor by tensor, the masks among them.
    """
    engine = LLM(folder, **{**DEFAULTS, **options})
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]

    def ask(request: LoRARequest | None = None) -> list[dict[str, Any]]:
        answers = [answer.outputs[0] for answer in engine.generate(prompts, greedy, lora_request=request)]
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
        with uninitialised_memory_is_nan():
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
        "mlp_widths": engine.apply_model(mlp_widths)[0],
    }


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
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


def chosen_logprobs(answer: Any) -> list[float] | None:
    if answer.logprobs is None:
        return None
    return [chosen[token].logprob for token, chosen in zip(answer.token_ids, answer.logprobs, strict=True)]


def skip_inspection() -> None:
    """Hand vLLM all classes but Llama's: it would import itself again in a new process to look at each, for 5-10 s."""
    load_general_plugins()
    for config in CONFIGS[1:]:
        loaded = pkgutil.resolve_name(model_class(config))
        ModelRegistry.register_model(loaded.__name__, loaded)


def main() -> None:
    skip_inspection()
    results = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            results.append(serve(**job))
        except Exception as error:  # the test looks at the message
            results.append({"error": f"{type(error).__name__}: {error}"})
        cleanup_dist_env_and_memory()
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
