"""Builds mixtures of experts for vLLM whose routed experts have different widths, from vLLM's own
models.

vLLM builds its stock model; `moe_layer.py` replaces the storage and the kernel of the routed
experts only. This file refuses unsupported settings and checks every tensor. A family is one class
at the end of this file.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.deepseek_v2 import DeepseekForCausalLM, DeepseekV2ForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.olmoe import OlmoeForCausalLM
from vllm.model_executor.models.qwen2_moe import Qwen2MoeForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from ddp_plugins.limits import CheckedAdapters, plain_config
from ddp_plugins.loading import CheckedLoading
from ddp_plugins.moe_layer import ONLINE, RaggedExpertsConfig, check_experts, unsupported
from ddp_vllm.remote_code.widths import ModelWidths
from ddp_vllm.tensor_parallel import check_tensor_parallel

# vLLM's fused parameters and the tensors on disk they consist of; vLLM's own tables omit shared
# experts
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def check_settings(vllm_config: VllmConfig) -> None:
    """Refuse settings that routed experts of different widths cannot be served with.

    Raises: SettingError, naming the setting and what works.
    """
    quantization, parallel = vllm_config.quant_config, vllm_config.parallel_config
    if quantization is not None and quantization.get_name() != ONLINE:
        raise unsupported(f"quantization={quantization.get_name()}")
    check_experts(vllm_config)
    check_tensor_parallel(
        parallel.tensor_parallel_size,
        plain_config(vllm_config.model_config.hf_config),
        expert_parallel=parallel.enable_expert_parallel,
        remedy="choose one of them" + ("" if parallel.enable_expert_parallel else ", or --enable-expert-parallel"),
    )


@contextmanager
def ragged_experts(vllm_config: VllmConfig, config: Mapping[str, Any]) -> Iterator[None]:
    """Build a stock model with our method for its routed experts. config: the model's fields."""
    vllms = vllm_config.quant_config
    vllm_config.quant_config = RaggedExpertsConfig.from_config(config, vllms)
    try:
        yield
    finally:
        vllm_config.quant_config = vllms


class NonUniformExperts(CheckedAdapters, CheckedLoading):
    """Mixin for vLLM's model class: routed experts of different widths, and checks of settings and
    weights."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = plain_config(vllm_config.model_config.hf_config)
        widths = ModelWidths.of(config)
        check_settings(vllm_config)
        with ragged_experts(vllm_config, config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.expect_weights(vllm_config, widths, self.expert_projections())

    def expert_projections(self) -> Iterator[str]:
        """Yield the names on disk of the projections of this rank's kept experts."""
        for name, module in self.named_modules():
            if isinstance(module, RoutedExperts):
                on_disk = name.rpartition(".")[0]
                for expert, width in enumerate(module.quant_method.widths):
                    if width and module.expert_map_manager.is_local_expert(expert):
                        for part in (module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name):
                            yield f"{on_disk}.{expert}.{part}"

    def needed_names(self) -> Iterator[str]:
        """Yield the names on disk of all tensors of this rank: for these models vLLM reports no
        missing tensor."""
        yield from (f"{name}.weight" for name in self.expert_projections())
        seen: set[int] = set()  # a tied head is the embedding, and not on disk
        for module_name, module in self.named_modules():
            if isinstance(module, RoutedExperts):
                continue
            parent, _, last = module_name.rpartition(".")
            own = {name: value for name, value in module.named_parameters(recurse=False) if id(value) not in seen}
            seen.update(map(id, own.values()))
            if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
                # vLLM adds the scales
                own = {name: value for name, value in own.items() if name in ("weight", "bias")}
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
