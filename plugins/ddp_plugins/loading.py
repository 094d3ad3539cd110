"""Checks every tensor that vLLM loads into a pruned model, skips the masks, and reports missing
tensors."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import LinearBase

from ddp_plugins.limits import warn_of_new_vllm
from ddp_vllm.errors import CheckpointError
from ddp_vllm.formats import IN_PLACE, SUBBLOCKS, is_leftover
from ddp_vllm.masks import is_mask
from ddp_vllm.remote_code.files import WEIGHTS, earlier_copies
from ddp_vllm.remote_code.widths import ModelWidths


class CheckedLoading:
    """Mixin that checks the weights; it precedes vLLM's own model class, whose `load_weights` it
    calls."""

    config: Any
    named_modules: Any
    packed_modules_mapping: dict[str, list[str]]
    widths: ModelWidths
    is_loaded: bool
    """Whether the whole model was loaded once; later loads may be partial, as in reinforcement
    learning."""
    is_quantized = False
    earlier_copies: Counter[str]
    """Copies of a tensor that vLLM reads before the one that the index names."""
    in_place: bool
    """Whether another tool wrote the folder, and vLLM opens it as it is."""

    def expect_weights(self, vllm_config: VllmConfig, widths: ModelWidths, projections: Iterable[str]) -> None:
        """Set the widths `load_weights` checks against. projections: names on disk of the modules
        pruning may cut."""
        warn_of_new_vllm()
        unknown = [name for name in projections if widths.expected(f"{name}.weight") is None]
        assert not unknown, f"{unknown[0]} is not in the family's table in tensors.py: neither checked nor padded"
        self.in_place = hasattr(vllm_config.model_config.hf_config, IN_PLACE)
        folder = Path(vllm_config.model_config.model)
        has_weights = any(folder.glob(WEIGHTS))  # a name on the hub has none
        self.earlier_copies = earlier_copies(folder) if has_weights else Counter()
        if self.in_place and not has_weights:
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

    def fitted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a compact tensor at the size it has in memory."""
        return tensor

    def linear_layers(self) -> Iterator[tuple[str, LinearBase]]:
        """Yield each linear layer of this rank with its name on disk; a fused layer once per name
        on disk."""
        for name, module in self.named_modules():
            if isinstance(module, LinearBase):
                parent, _, last = name.rpartition(".")
                for part in self.packed_modules_mapping.get(last, (last,)):
                    yield f"{parent}.{part}", module

    def needed_names(self) -> Iterator[str]:
        """Yield the names on disk of this rank's tensors whose absence vLLM itself would not
        report."""
        for name, linear in self.linear_layers():
            yield f"{name}.weight"
            if linear.bias is not None:
                yield f"{name}.bias"

    def check_complete(self, names: set[str]) -> None:
        """Refuse missing tensors: vLLM counts a fused parameter as loaded when one part was, the
        rest uninitialized."""
        modules = {name.rpartition(".")[0] for name in names}
        for name in self.needed_names():
            module, _, kind = name.rpartition(".")
            # quantized weights have other names, such as weight_packed
            if name not in names and not (self.is_quantized and kind == "weight" and module in modules):
                raise CheckpointError(f"tensor {name} is missing; download it or run ddp-vllm apply again")

    def _checked(
        self, weights: Iterable[tuple[str, torch.Tensor]], names: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Check each tensor before vLLM's loaders receive it, and add its name to `names`."""
        for name, tensor in weights:
            # --load-format runai_streamer reads every safetensors file of the folder
            if is_mask(name):
                continue
            if not self.is_loaded and self.earlier_copies[name]:
                self.earlier_copies[name] -= 1
                continue
            if self.in_place and is_leftover(self.widths, name, tensor.shape):
                continue
            if name in names and not self.is_loaded:
                raise CheckpointError(f"tensor {name} occurs twice; remove the file that is not part of the model")
            names.update(self.widths.checked([(name, tensor.shape, str(tensor.dtype))]))
            yield name, self.fitted(name, tensor)
