"""Checks every tensor that vLLM loads into a pruned model, skips the masks, and reports missing
tensors."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import LinearBase

from ddp_plugins.limits import warn_of_new_vllm
from ddp_plugins.padding import pad
from ddp_vllm.errors import CheckpointError
from ddp_vllm.formats import IN_PLACE, SUBBLOCKS, is_leftover
from ddp_vllm.masks import is_mask
from ddp_vllm.remote_code.files import WEIGHTS
from ddp_vllm.remote_code.widths import Widths


class CheckedLoading:
    """Mixin that checks the weights; it precedes vLLM's own model class, whose `load_weights` it
    calls."""

    named_modules: Any
    packed_modules_mapping: dict[str, list[str]]
    widths: Widths
    block: int
    """Of channels, as in `tensor_parallel.padded_widths`."""
    is_loaded: bool
    """Whether the whole model was loaded once; later loads may be partial, as in reinforcement
    learning."""
    is_quantized = False
    in_place: bool
    """Whether another tool wrote the folder, and vLLM opens it as it is."""

    def expect_weights(self, vllm_config: VllmConfig, widths: Widths) -> None:
        """Set the widths `load_weights` checks against; call it when all layers are built."""
        warn_of_new_vllm()
        unknown = [name for name, _ in self.linear_layers() if widths.find(f"{name}.weight") is None]
        assert not unknown, f"{unknown[0]} is not in the family's table in tensors.py: neither checked nor padded"
        self.in_place = hasattr(vllm_config.model_config.hf_config, IN_PLACE)
        if self.in_place and not any(Path(vllm_config.model_config.model).glob(WEIGHTS)):
            self.allow_patterns_overrides = [WEIGHTS, f"{SUBBLOCKS}/*.safetensors", "*.safetensors", "*.bin"]
        self.widths = replace(widths, is_quantized=widths.is_quantized or vllm_config.quant_config is not None)
        # these read nothing at the start, or fill the parameters without `load_weights`
        filled = ("dummy", "sharded_state", "runai_streamer_sharded")
        self.is_loaded = vllm_config.load_config.load_format in filled

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load compact weights. Raises: WidthsError, CheckpointError, naming the wrong or missing
        tensor."""
        names: set[str] = set()
        loaded = super().load_weights(self._checked(weights, names))  # type: ignore[misc]
        if not self.is_loaded:
            self.check_complete(names)
        self.is_loaded = True
        return loaded

    def linear_layers(self) -> Iterator[tuple[str, LinearBase]]:
        """Yield each linear layer of this rank with its name on disk; a fused layer once per name
        on disk."""
        for name, module in self.named_modules():
            if isinstance(module, LinearBase):
                parent, _, last = name.rpartition(".")
                for part in self.packed_modules_mapping.get(last, (last,)):
                    yield f"{parent}.{part}", module

    def check_complete(self, names: set[str]) -> None:
        """Refuse missing tensors: vLLM counts a fused parameter as loaded when one part was, the
        rest uninitialized. Refuse a bias that vLLM would drop silently.
        Raises: WidthsError, CheckpointError, naming the tensor."""
        modules = {name.rpartition(".")[0] for name in names}
        for module, linear in self.linear_layers():
            # quantized weights have other names, such as weight_packed
            has_weight = f"{module}.weight" in names or (self.is_quantized and module in modules)
            has_bias, needs_bias = f"{module}.bias" in names, linear.bias is not None
            if not has_weight or (needs_bias and not has_bias):
                raise CheckpointError(
                    f"tensor {module}.{'bias' if has_weight else 'weight'} is missing; download it or run ddp-vllm "
                    "apply again"
                )
            if has_bias and not needs_bias:
                raise CheckpointError(f"vLLM's {type(linear).__name__} has no bias for tensor {module}.bias; remove it")
        self.widths.check_complete(names)

    def _checked(
        self, weights: Iterable[tuple[str, torch.Tensor]], names: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Check each tensor before vLLM's loaders receive it, and add its name to `names`."""
        for name, tensor in weights:
            # --load-format runai_streamer reads every safetensors file of the folder
            if is_mask(name):
                continue
            if self.in_place and is_leftover(self.widths, name, tensor.shape):
                continue
            if name in names and not self.is_loaded:
                raise CheckpointError(f"tensor {name} occurs twice; remove the file that is not part of the model")
            names.update(self.widths.checked([(name, tensor.shape, str(tensor.dtype))]))
            yield name, pad(name, tensor, self.widths, get_tensor_model_parallel_world_size(), self.block)
