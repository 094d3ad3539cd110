"""Runs routed experts of different widths inside vLLM's own MoE blocks.

vLLM asks a quantization config for the method of each layer. Ours returns a method for routed experts only, with packed
weights and one kernel call. Router, shared experts, dispatch and all-reduce stay vLLM's.

Shape letters: S packed rows (channels of all experts on this rank), H hidden size, T tokens, K experts per token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs

from ddp_plugins.moe_experts import ROW_ALIGNMENT, ExpertLayout, empty_weights, finish_weights, pack_expert
from ddp_plugins.padding import share_channels
from ddp_vllm.errors import CheckpointError
from ddp_vllm.remote_code.widths import LayerWidths, parse_layers


class RaggedExpertsMethod(FusedMoEMethodBase):
    """Stores, loads and runs the routed experts of one layer."""

    def __init__(self, moe: FusedMoEConfig, widths: Sequence[int]) -> None:
        """widths: kept channels of each of the model's experts, by expert id."""
        super().__init__(moe)
        self.widths = widths

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Register packed weights on `layer`: w13 `[2, S, H]` and w2 `[S, H]`, zero where rows are padding."""
        if layer.activation is not MoEActivation.SILU or layer.apply_router_weight_on_input:
            raise CheckpointError(f"{layer.layer_name}: experts are served with hidden_act=silu only")
        local = [expert for expert in range(len(self.widths)) if layer.expert_map_manager.is_local_expert(expert)]
        shares = share_channels([self.widths[e] for e in local], self.moe.tp_rank, self.moe.tp_size, ROW_ALIGNMENT)
        assert len(shares) == num_experts
        self.shares = dict(zip(local, enumerate(shares), strict=True))
        self.layout = ExpertLayout.of([len(share) for share in shares])
        w13, w2 = empty_weights(self.layout, hidden_size, params_dtype)
        layout_3E = self.layout.table(w2.device)
        set_weight_attrs(layout_3E, {"weight_loader_numel": 0})
        layer.register_buffer("layout_3E", layout_3E, persistent=False)
        for name, weight in (("w13_weight", w13), ("w2_weight", w2)):  # vLLM's loaders look for these names
            parameter = nn.Parameter(weight, requires_grad=False)
            # vLLM finishes reloading a layer after this many numbers; padding is never loaded
            num_loaded = weight.numel() // max(1, self.layout.num_rows) * sum(self.layout.widths)
            set_weight_attrs(parameter, {"weight_loader": self._load, "weight_loader_numel": num_loaded})
            layer.register_parameter(name, parameter)

    def _load(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's channels of one tensor into the packed weights; report failure for experts of other ranks.

        loaded_weight: compact, as on disk: gate (w1) and up (w3) `[width, H]`, down (w2) `[H, width]`.
        """
        if expert_id not in self.shares:
            return False if return_success else None
        local_id, share = self.shares[expert_id]
        axis = 1 if shard_id == "w2" else 0
        part = loaded_weight.narrow(axis, share.start, len(share))
        matrix = {"w1": "gate_wH", "w3": "up_wH", "w2": "down_Hw"}[shard_id]
        pack_expert(self.layout, param.data, param.data, local_id, **{matrix: part})  # param is w13 or w2
        return True if return_success else None

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        w13, w2 = finish_weights(self.layout, layer.w13_weight.data, layer.w2_weight.data)
        layer.w13_weight.data, layer.w2_weight.data = w13, w2  # vLLM's replace_parameter would copy out of huge pages
        if w2.device.type == "cuda":
            from ddp_plugins.moe_kernel import warm_up  # Triton is not installed with every CPU version of torch

            num_slots = self.moe.experts_per_token
            warm_up(w13, w2, layer.layout_3E, self.layout.max_width, num_slots, layer.expert_map)

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
        """x and result: `[T, H]`; topk_weights, topk_ids: `[T, K]`, ids of the whole model's experts."""
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
        )


class RaggedExpertsConfig(QuantizationConfig):
    """Returns the method of a layer to vLLM: ours for routed experts, vLLM's unquantized ones for all others."""

    def __init__(self, layers: Sequence[LayerWidths]) -> None:
        super().__init__()
        self.layers = layers

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            widths = self.layers[extract_layer_index(prefix)].expert_intermediate_sizes
            assert widths is not None  # checked by parse_layers
            return RaggedExpertsMethod(layer.moe_config, widths)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def get_name(self) -> Any:
        return "ddp_ragged_experts"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "RaggedExpertsConfig":
        """config: the fields of a pruned model's config."""
        return cls(parse_layers(config))
