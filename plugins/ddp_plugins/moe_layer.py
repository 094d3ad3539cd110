"""Runs routed experts of different widths inside vLLM's own MoE blocks.

vLLM asks a quantization config for the method of each layer. Ours (`any_model.py`) returns this
method for routed experts, with packed weights and one kernel call. Router, shared experts, dispatch
and all-reduce stay vLLM's. If vLLM quantizes the model to FP8, its own config decides whether the
experts are FP8 too.

Shape letters: S packed rows (channels of all experts on this rank), H hidden size, T tokens, K
experts per token.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticChannelSym, kFp8StaticTensorSym
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from ddp_plugins.limits import plain_config
from ddp_plugins.moe_experts import (
    FP8,
    ExpertLayout,
    empty_weights,
    finish_weights,
    pack_expert,
    quantize_weights,
)
from ddp_plugins.padding import share_channels
from ddp_vllm.errors import CheckpointError, SettingError
from ddp_vllm.remote_code.widths import Widths
from ddp_vllm.tensor_parallel import EXPERT_BLOCK, check_tensor_parallel

Scales = Literal["tensor", "channel"]
"""FP8 weights have a scale per matrix or per output."""


class RaggedExpertsMethod(FusedMoEMethodBase):
    """Stores, loads and runs the routed experts of one layer."""

    def __init__(self, moe: FusedMoEConfig, widths: Sequence[int], scales: Scales | None = None) -> None:
        """widths: kept channels of each of the model's experts, by expert id. scales: None for
        unquantized weights."""
        super().__init__(moe)
        self.widths = widths
        self.scales = scales
        # vLLM's sign for weights quantized while they load
        self.uses_meta_device = scales is not None

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Register packed weights on `layer`: w13 `[2, S, H]` and w2 `[S, H]`, zero where rows are
        padding."""
        alpha, beta = layer.swiglu_alpha, layer.swiglu_beta
        foreign = {
            f"activation {layer.activation.value}": layer.activation is not MoEActivation.SILU,
            "apply_router_weight_on_input": layer.apply_router_weight_on_input,
            "biases": self.moe.has_bias,
            f"swiglu_alpha {alpha}": alpha not in (None, 1.0),
            f"swiglu_beta {beta}": beta not in (None, 0.0),
        }
        if stated := [name for name, is_stated in foreign.items() if is_stated]:
            raise CheckpointError(
                f"{layer.layer_name}: experts of different widths are not served with {stated[0]}; run this model with "
                "transformers"
            )
        self.limit = layer.swiglu_limit
        local = [expert for expert in range(len(self.widths)) if layer.expert_map_manager.is_local_expert(expert)]
        shares = share_channels([self.widths[e] for e in local], self.moe.tp_rank, self.moe.tp_size, EXPERT_BLOCK)
        assert len(shares) == num_experts
        self.shares = dict(zip(local, enumerate(shares), strict=True))
        kept = [expert for expert in local if self.widths[expert]]
        self.missing = {(expert, shard) for expert in kept for shard in ("w1", "w2", "w3")}
        self.num_expected = len(self.missing)
        self.layout = ExpertLayout.of([len(share) for share in shares])
        self.dtype = params_dtype
        w13, w2 = empty_weights(self.layout, hidden_size, params_dtype, "meta" if self.uses_meta_device else None)
        layout_3E = self.layout.table(torch.empty(0).device)
        set_weight_attrs(layout_3E, {"weight_loader_numel": 0})
        layer.register_buffer("layout_3E", layout_3E, persistent=False)
        # vLLM's loaders look for these names
        for name, weight in (("w13_weight", w13), ("w2_weight", w2)):
            parameter = nn.Parameter(weight, requires_grad=False)
            # vLLM finishes reloading a layer after this many numbers; padding is never loaded
            num_loaded = weight.numel() // max(1, self.layout.num_rows) * sum(self.layout.widths)
            set_weight_attrs(parameter, {"weight_loader": self._load, "weight_loader_numel": num_loaded})
            layer.register_parameter(name, parameter)
        if self.uses_meta_device:
            # vLLM allocates, loads and processes the layer when it has all tensors
            initialize_online_processing(layer)

    def _load(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's channels of one tensor into the packed weights; report failure for
        experts of other ranks.

        loaded_weight: compact, as on disk: gate (w1) and up (w3) `[width, H]`, down (w2) `[H,
            width]`.
        """
        if expert_id not in self.shares:
            return False if return_success else None
        self.missing.discard((expert_id, shard_id))
        local_id, share = self.shares[expert_id]
        axis = 1 if shard_id == "w2" else 0
        part = loaded_weight.narrow(axis, share.start, len(share))
        matrix = {"w1": "gate_wH", "w3": "up_wH", "w2": "down_Hw"}[shard_id]
        # param is w13 or w2
        pack_expert(self.layout, param.data, param.data, local_id, **{matrix: part})
        return True if return_success else None

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        # vLLM does not report missing experts; dummy weights and sharded states are not loaded here
        if self.missing and len(self.missing) < self.num_expected:
            expert, shard = min(self.missing)
            raise CheckpointError(
                f"{layer.layer_name}: tensor {shard} of expert {expert} is missing ({len(self.missing)} in all); "
                "download it or run ddp-vllm apply again"
            )
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data
        if self.uses_meta_device:
            if w2.dtype == FP8:  # vLLM calls again after the last layer
                return
            w13, w2, *scales = quantize_weights(self.layout, w13, w2, per_tensor=self.scales == "tensor")
            for name, scale in zip(("w13", "w2"), scales, strict=True):
                layer.register_parameter(f"{name}_weight_scale", nn.Parameter(scale, requires_grad=False))
        w13, w2 = finish_weights(self.layout, w13, w2)
        # vLLM's replace_parameter would copy out of huge pages
        layer.w13_weight.data, layer.w2_weight.data = w13, w2
        if w2.device.type == "cuda":
            # Triton is not installed with every CPU version of torch
            from ddp_plugins.moe_kernel import warm_up

            num_slots = self.moe.experts_per_token
            shared = (w13, w2, layer.layout_3E, self.layout.max_width, num_slots, layer.expert_map)
            warm_up(*shared, self._scales_of(layer), self.limit, self.dtype)

    def _scales_of(self, layer: RoutedExperts) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (layer.w13_weight_scale.data, layer.w2_weight_scale.data) if self.scales else (None, None)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> Any:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x and result: `[T, H]`; topk_weights, topk_ids: `[T, K]`, ids of the whole model's
        experts."""
        if not self.layout.num_rows:
            return torch.zeros_like(x)
        return torch.ops.ddp_vllm.ragged_moe(
            x,
            layer.w13_weight,
            layer.w2_weight,
            layer.layout_3E,
            self.layout.max_width,
            topk_weights,
            topk_ids,
            layer.expert_map,
            *self._scales_of(layer),
            self.limit,
        )


def unsupported(stated: str) -> SettingError:
    """Return the error for a number format. stated: what the user asked for."""
    return SettingError(
        f"{stated}: experts of different widths are served unquantized or in FP8 with one scale per matrix or output; "
        "serve the unquantized export with --quantization fp8_per_channel or fp8_per_tensor"
    )


def check_experts(vllm_config: VllmConfig, widths: Widths) -> None:
    """Refuse settings that routed experts of these widths cannot be served with.

    Raises: SettingError, naming the setting and what works.
    """
    lora, parallel = vllm_config.lora_config, vllm_config.parallel_config
    if lora is not None and (lora.target_modules is None or any("experts" in name for name in lora.target_modules)):
        raise SettingError(
            "LoRA adapters cannot be served on routed experts of different widths; pass "
            "--lora-target-modules without experts, such as qkv_proj o_proj, and adapters that change nothing else"
        )
    if parallel.enable_eplb:
        raise SettingError("--enable-eplb moves experts of one width only; serve pruned experts without it")
    # vLLM gathers the tokens of all ranks, but masks only one rank's
    if parallel.data_parallel_size > 1:
        raise SettingError(
            f"data_parallel_size={parallel.data_parallel_size}: experts of different widths do not support data "
            "parallelism; start a server for each replica, or use --tensor-parallel-size with --enable-expert-parallel"
        )
    check_tensor_parallel(
        parallel.tensor_parallel_size,
        plain_config(vllm_config.model_config.hf_text_config) | {"quantization_config": widths.to_json()},
        expert_parallel=parallel.enable_expert_parallel,
        remedy="choose one of them" + ("" if parallel.enable_expert_parallel else ", or --enable-expert-parallel"),
    )


def scales_of(online: Any, layer: RoutedExperts, prefix: str) -> Scales | None:
    """Return how the experts of a layer are quantized; None: they are not.

    online: vLLM's config for quantization of weights while they load, or None.
    Raises: SettingError for formats other than FP8.
    """
    if online is None:
        return None
    if (resolved := online.resolve_quant_method_cls(type(layer), prefix)) is None:
        return None
    formats: dict[Any, Scales] = {kFp8StaticTensorSym: "tensor", kFp8StaticChannelSym: "channel"}
    stated, scales = str(resolved[3]), formats.get(resolved[3].weight)
    if scales is None:
        raise unsupported(f"{prefix} quantized as {stated}")
    if not current_platform.is_cpu() and not current_platform.has_device_capability(89):
        raise SettingError(
            "FP8 experts of different widths require a GPU of compute capability 8.9 or newer (RTX 4090, H100); "
            "serve them unquantized, without --quantization"
        )
    return scales
