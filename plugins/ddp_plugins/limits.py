"""What a pruned dense model cannot be served with, said before weights are read.

vLLM calls `Limits` for our architectures while it puts its configuration together, before any worker starts, and hands
adapters to its LoRA manager, which `check_adapters` makes look at their shapes.
"""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.widths import ModelWidths, parse_layers
from ddp_vllm.tensor_parallel import check_tensor_parallel

RETRAIN = "it was made for other widths: train the adapter on this pruned folder"


def plain_config(config: Any) -> dict[str, Any]:
    """Return the fields of a transformers config as `config.json` has them; its model type belongs to the class."""
    return vars(config) | {"model_type": config.model_type}


class Limits(VerifyAndUpdateConfig):
    """Raises: SettingError for a tensor-parallel size over which the model does not split, naming those that work."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        model, num_ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
        config = plain_config(model.hf_config)
        check_tensor_parallel(num_ranks, config)
        for present, what in ((model.quantization, "quantised weights"), (vllm_config.lora_config, "LoRA adapters")):
            if present is not None:
                remedy = f"choose one of them, as {what} cannot be padded, or prune with a suitable --tp"
                check_tensor_parallel(num_ranks, config, parse_layers(config), remedy=remedy)


def check_adapters(manager: Any, widths: ModelWidths, hidden_size: int) -> None:
    """Let vLLM's LoRA manager check every adapter it is given; it would copy a narrower one into a corner unseen."""
    add_adapter = manager.add_adapter

    def add_checked(adapter: Any) -> Any:
        check_adapter(adapter.loras, widths, hidden_size)
        return add_adapter(adapter)

    manager.add_adapter = add_checked


def check_adapter(loras: Mapping[str, Any], widths: ModelWidths, hidden_size: int) -> None:
    """Refuse an adapter that was made for other widths.

    loras: by module, as vLLM reads them from disk: `lora_a` `[rank, in]`, `lora_b` `[out, rank]`.
    Raises: SettingError, naming the tensor, its shape and the one its layer asks for; WidthsError for an unknown layer.
    """
    for name, lora in loras.items():
        expected = widths.expected(f"{name}.weight")
        if expected is None or isinstance(lora.lora_b, list) or not lora.lora_b.any():
            continue  # adds nothing, as the adapters vLLM warms up with: packed, or cut to one rank already
        axis, length = expected
        if length == 0:
            raise SettingError(f"the adapter changes {name}, a block that was pruned away; {RETRAIN}")
        sizes = (hidden_size, length) if axis == 0 else (length, hidden_size)
        for letter, tensor, side, size in (("A", lora.lora_a, 1, sizes[0]), ("B", lora.lora_b, 0, sizes[1])):
            if tensor.shape[side] != size:
                wanted = [size, tensor.shape[1]] if side == 0 else [tensor.shape[0], size]
                raise SettingError(
                    f"the adapter's {name}.lora_{letter} has shape {list(tensor.shape)}, and this layer asks for "
                    f"{wanted}; {RETRAIN}"
                )
