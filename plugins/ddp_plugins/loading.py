"""What every pruned model does with the tensors vLLM hands it: leave the masks out, check shapes, and miss nothing."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import LinearBase

from ddp_plugins.limits import warn_of_new_vllm
from ddp_vllm.errors import CheckpointError
from ddp_vllm.masks import is_mask
from ddp_vllm.remote_code.widths import ModelWidths


class CheckedLoading:
    """Goes before vLLM's own model class, whose `load_weights` it calls."""

    config: Any
    named_modules: Any
    packed_modules_mapping: dict[str, list[str]]
    widths: ModelWidths
    is_loaded: bool
    """Whether the whole model came once; what comes later may be any part of it, as in reinforcement learning."""
    is_quantised = False

    def expect_weights(self, vllm_config: VllmConfig, widths: ModelWidths, projections: Iterable[str]) -> None:
        """State what `load_weights` checks against. projections: modules on disk that vLLM has and pruning may cut."""
        warn_of_new_vllm()
        unknown = [name for name in projections if widths.expected(f"{name}.weight") is None]
        assert not unknown, f"{unknown[0]} is not in the family's table in tensors.py: neither checked nor padded"
        self.widths = replace(widths, is_quantised=widths.is_quantised or vllm_config.quant_config is not None)
        self.is_loaded = vllm_config.load_config.load_format == "dummy"  # then nothing is read before the first update

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load compact weights. Raises: WidthsError, CheckpointError, naming the tensor that is wrong or missing."""
        names: set[str] = set()
        loaded = super().load_weights(self._checked(weights, names))  # type: ignore[misc]
        if not self.is_loaded:
            self.check_complete(names)
        self.is_loaded = True
        return loaded

    def fitted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a compact tensor in the size it has in memory."""
        return tensor

    def linear_layers(self) -> Iterator[tuple[str, LinearBase]]:
        """Yield each linear layer of this rank with its name on disk; one that vLLM fused under each of its names."""
        for name, module in self.named_modules():
            if isinstance(module, LinearBase):
                parent, _, last = name.rpartition(".")
                for part in self.packed_modules_mapping.get(last, (last,)):
                    yield f"{parent}.{part}", module

    def needed_names(self) -> Iterator[str]:
        """Yield the names on disk of all that this rank holds and vLLM itself might miss without a word."""
        for name, linear in self.linear_layers():
            yield f"{name}.weight"
            if linear.bias is not None:
                yield f"{name}.bias"

    def check_complete(self, names: set[str]) -> None:
        """vLLM counts a fused parameter as loaded when one of its parts was; missing parts would be noise."""
        modules = {name.rpartition(".")[0] for name in names}
        for name in self.needed_names():
            module, _, kind = name.rpartition(".")
            # quantised weights go by other names, such as weight_packed
            if name not in names and not (self.is_quantised and kind == "weight" and module in modules):
                raise CheckpointError(f"tensor {name} is missing; download it or run ddp-vllm apply again")

    def _checked(
        self, weights: Iterable[tuple[str, torch.Tensor]], names: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Check each tensor before vLLM's loaders see it, and note its name."""
        for name, tensor in weights:
            if is_mask(name):  # --load-format runai_streamer reads every safetensors file of the folder
                continue
            if name in names and not self.is_loaded:
                raise CheckpointError(f"tensor {name} comes twice; remove the file that is not the model's")
            names.update(self.widths.checked([(name, tensor.shape, str(tensor.dtype))]))
            yield name, self.fitted(name, tensor)
