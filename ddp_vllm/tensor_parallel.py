"""Over how many devices a model splits: the one rule, and the one sentence that names the sizes that work."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.widths import LayerWidths, count_experts, dense_expert_size

Layers = Sequence[LayerWidths] | Callable[[int], Sequence[LayerWidths]]
"""The layers that have to split without padding; or what returns them for a number of devices."""


def tensor_parallel_sizes(
    config: Mapping[str, Any], layers: Layers = (), *, expert_parallel: bool = False
) -> list[int]:
    """Return the tensor-parallel sizes at which vLLM takes the model and none of `layers` needs padding.

    vLLM asks that the query heads of the dense model divide, and the channels of its experts, but for
    `expert_parallel`, which asks for an expert a device. config: as plain data, dense or pruned.
    """
    heads = config["num_attention_heads"]
    return [size for size in range(1, heads + 1) if _reason(size, config, layers, expert_parallel) is None]


def check_tensor_parallel(
    num_ranks: int,
    config: Mapping[str, Any],
    layers: Layers = (),
    *,
    expert_parallel: bool = False,
    remedy: str = "choose one of them",
) -> None:
    """Refuse a size that is not one of `tensor_parallel_sizes`.

    remedy: what to do, after the valid sizes. Raises: SettingError, naming what does not split and the valid sizes.
    """
    if num_ranks < 1:
        raise SettingError(f"the tensor-parallel size is {num_ranks}; it must be at least 1")
    if reason := _reason(num_ranks, config, layers, expert_parallel):
        valid = ", ".join(map(str, tensor_parallel_sizes(config, layers, expert_parallel=expert_parallel)))
        raise SettingError(f"tensor-parallel size {num_ranks} {reason}; valid sizes: {valid}; {remedy}")


def _reason(num_ranks: int, config: Mapping[str, Any], layers: Layers, expert_parallel: bool) -> str | None:
    """Return what the size does wrong, as what follows it in a sentence; None if the model splits."""
    heads, experts = config["num_attention_heads"], count_experts(config)
    if heads % num_ranks:
        return f"does not divide the {heads} query heads of the dense model, as vLLM asks"
    if expert_parallel and num_ranks > experts:
        return f"needs an expert for each device, and a layer has {experts}"
    if experts and not expert_parallel and dense_expert_size(config) % num_ranks:
        return f"does not divide the {dense_expert_size(config):,} channels of a dense expert, as vLLM asks"
    for index, layer in enumerate(layers(num_ranks) if callable(layers) else layers):
        if not layer.splits_over(num_ranks):
            return (
                f"does not split layer {index} without padding ({layer.num_kv_heads} KV heads for "
                f"{list(layer.query_heads_per_kv_head)} query heads, {layer.intermediate_size:,} channels)"
            )
    return None
