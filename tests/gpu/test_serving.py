"""Does the plugin serve pruned models correctly on this GPU, in bfloat16, with and without CUDA graphs?

Random models of middle size answer four prompts. The log-probabilities of vLLM's greedy tokens are compared with
those of transformers in float32 on the same weights and tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddp_vllm.dimensions import widths_of
from ddp_vllm.families import pruned_config
from ddp_vllm.remote_code.widths import Widths
from lease import DEVICE, DRY

LAYERS = [  # unequal KV heads, removed attention, a removed MLP, odd widths
    ([4, 4, 4, 4], 1408), ([4, 4], 777), ([], 1000), ([4], 0), ([4, 4, 4], 65), ([4, 4, 4, 4], 512),
]  # fmt: skip
# two ranks divide it without padding
EVEN = [([4, 4, 4, 4], 1408), ([4, 4], 776), ([], 1000), ([4, 4], 0)]
UNEVEN = [([4, 2, 1][: max(1, len(heads))], width) for heads, width in LAYERS]
EXPERTS = [0, 1, 17, 48, 100, 128, 256, 256]
MODELS = {"ragged": LAYERS, "uneven": UNEVEN, "even": EVEN, "experts": LAYERS[:3]}
TOLERANCE = 0.15  # nats, of a bfloat16 model's log-probabilities
PROMPTS = [[5], list(range(1, 40)), [(7 * i) % 2000 + 3 for i in range(300)], [(11 * i) % 2000 + 3 for i in range(100)]]
GRAPHS = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4, 16]}
}
EAGER = {"enforce_eager": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how vLLM serves it."""

    model: str
    options: dict[str, Any] = field(default_factory=lambda: GRAPHS)
    adapter: bool = False
    rounds: int = 1
    """How often the prompts are asked; the last answers count."""
    counter: str = ""
    """A counter of vLLM that must be above 0 afterwards."""

    @property
    def ranks(self) -> int:
        return self.options.get("tensor_parallel_size", 1)


DRAFT = {"method": "draft_model", "num_speculative_tokens": 3}  # its model is `ragged`
CASES = {  # the most important first
    "ragged, graphs": Case(model="ragged"),
    "experts, graphs": Case(model="experts"),
    "uneven groups, graphs": Case(model="uneven"),
    "ragged, eager": Case(model="ragged", options=EAGER),
    "experts, eager": Case(model="experts", options=EAGER),
    "uneven groups, eager": Case(model="uneven", options=EAGER),
    "prefix cache": Case(
        model="ragged", options=GRAPHS | {"enable_prefix_caching": True, "disable_log_stats": False}, rounds=2,
        counter="vllm:prefix_cache_hits",
    ),
    "speculative decoding": Case(
        model="ragged", options=GRAPHS | {"speculative_config": DRAFT, "disable_log_stats": False},
        counter="vllm:spec_decode_num_accepted_tokens",
    ),
    "LoRA": Case(model="ragged", options=GRAPHS | {"enable_lora": True, "max_lora_rank": 8}, adapter=True),
    # torch.compile and piecewise graphs
    "ragged, vLLM's default": Case(model="ragged", options={}),
    "experts, vLLM's default": Case(model="experts", options={}),
    "ragged, two GPUs": Case(model="ragged", options=GRAPHS | {"tensor_parallel_size": 2}),
    "experts, two GPUs": Case(model="experts", options=GRAPHS | {"tensor_parallel_size": 2}),
    "LoRA, two GPUs": Case(
        model="even", options=GRAPHS | {"tensor_parallel_size": 2, "enable_lora": True, "max_lora_rank": 8},
        adapter=True,
    ),
}  # fmt: skip


def model_class(model: str) -> Any:
    """Return the class of transformers that computes a model."""
    from transformers import Qwen3MoeForCausalLM

    from ddp_vllm.remote_code.configuration_ddp_widths import register_widths
    from ddp_vllm.remote_code.modeling_ddp import DDPLlamaForCausalLM

    register_widths()
    return Qwen3MoeForCausalLM if model == "experts" else DDPLlamaForCausalLM


def write_model(folder: Path, model: str) -> None:
    """Write a random pruned model in bfloat16, and an adapter for a dense one."""
    sizes: dict[str, Any] = {
        "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1408, "max_position_embeddings": 1024,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "initializer_range": 0.05, "num_hidden_layers": len(MODELS[model]),
    }  # fmt: skip
    stated: dict[str, Any] = {
        "ddp_layers": [{"query_heads_per_kv_head": heads, "intermediate_size": width} for heads, width in MODELS[model]]
    }
    if model == "experts":
        stated = {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}
    torch.manual_seed(0)
    made = model_class(model)(model_class(model).config_class(**sizes, **stated)).to(torch.bfloat16)
    made.save_pretrained(folder)
    if model == "experts":
        narrow_experts(folder)
    if model in ("ragged", "even"):
        from peft import LoraConfig, get_peft_model

        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        settings = LoraConfig(target_modules=modules, r=4, lora_alpha=8, init_lora_weights=False)
        get_peft_model(made, settings).save_pretrained(folder / "adapter")


def narrow_experts(folder: Path) -> None:
    """Give the experts of a dense model their widths."""
    config = json.loads((folder / "config.json").read_text())
    layers = [
        replace(layer, expert_intermediate_sizes=tuple(EXPERTS[turn:] + EXPERTS[:turn]))
        for turn, layer in enumerate(widths_of(config).dense_layers)
    ]
    pruned = pruned_config(config, replace(widths_of(config), layers=tuple(layers)))
    widths, kept = Widths.of(pruned), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if (place := widths.find(name)) is None or place.length is None:
            kept[name] = tensor
        elif place.length:
            kept[name] = tensor.narrow(place.axis, 0, place.length).contiguous()
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(pruned))


def ask(folder: Path, case: Case) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return vLLM's greedy tokens after each prompt with their log-probabilities, and facts about
    the engine."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = {
        "dtype": "bfloat16", "max_model_len": 512, "skip_tokenizer_init": True, "max_num_seqs": 16,
        "enable_prefix_caching": False, "gpu_memory_utilization": 0.12,
    } | case.options  # fmt: skip
    if DRY:
        torch.compiler.set_stance("force_eager")
        options.pop("compilation_config", None)
        options |= EAGER | {"kv_cache_memory_bytes": 1 << 28, "num_gpu_blocks_override": 32}
    engine = LLM(str(folder), **options)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False)
    request = LoRARequest("adapter", 1, str(folder / "adapter")) if case.adapter else None
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for _ in range(case.rounds):
        outputs = engine.generate(prompts, greedy, use_tqdm=False, lora_request=request)
    first = [output.outputs[0] for output in outputs]
    config = engine.llm_engine.vllm_config
    facts: dict[str, Any] = {"cudagraph_mode": str(config.compilation_config.cudagraph_mode)}
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
    facts["attention"] = ", ".join(sorted(backends))
    if case.counter:
        counts = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
        facts[case.counter] = counts.get(case.counter, 0)
    return [
        {
            "tokens": list(answer.token_ids),
            "logprobs": [row[token].logprob for token, row in zip(answer.token_ids, answer.logprobs, strict=True)],
        }
        for answer in first
    ], facts


@torch.no_grad()
def compare(folder: Path, case: Case, answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the gaps in nats between vLLM's log-probabilities and those of transformers in
    float32.

    regret: how much likelier than vLLM's token the likeliest one is.
    """
    model = model_class(case.model).from_pretrained(folder, dtype=torch.float32).eval().to(DEVICE)
    if case.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder / "adapter").eval()
    gaps, regrets = list[float](), list[float]()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor(answer["tokens"], device=DEVICE)
        ids = torch.tensor([prompt + answer["tokens"]], device=DEVICE)
        logprobs = model(ids).logits.float().log_softmax(-1)[0, len(prompt) - 1 : -1]
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        gaps += (chosen.cpu() - torch.tensor(answer["logprobs"])).abs().tolist()
        regrets += (logprobs.amax(-1) - chosen).tolist()
    return {"worst_gap": max(gaps), "mean_gap": sum(gaps) / len(gaps), "worst_regret": max(regrets)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the random models, which are written when a case needs them."""
    from vllm.model_executor.models import registry

    from ddp_plugins.register import register_models

    # vLLM starts a process to look at a class, which takes 30 seconds where imports are slow
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )
    register_models()
    return tmp_path_factory.mktemp("serving")


# ranks are forked on a CPU, and threads survive no fork
@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: -CASES[name].ranks))
def test_vllm_answers_as_transformers(name: str, folder: Path) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    case = CASES[name]
    if case.ranks > (1 if DRY else torch.cuda.device_count()):
        pytest.skip(f"needs {case.ranks} GPUs")
    if DRY and case.options in (EAGER, {}):
        pytest.skip("on a CPU the case with graphs is the same")
    if "speculative_config" in case.options:
        case = replace(case, options=case.options | {"speculative_config": DRAFT | {"model": str(folder / "ragged")}})
    for model in {case.model, "ragged"}:
        if not (folder / model / "config.json").exists():
            write_model(folder / model, model)
    try:
        answers, facts = ask(folder / case.model, case)
        facts |= compare(folder / case.model, case, answers)
    finally:
        cleanup_dist_env_and_memory()
    print(name, facts)
    assert max(facts["worst_gap"], facts["worst_regret"]) < TOLERANCE, facts
    assert facts.get(case.counter, 1) > 0, facts
    if case.options is GRAPHS and not DRY:
        assert "FULL" in facts["cudagraph_mode"], "nothing was captured"
