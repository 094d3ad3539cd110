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
    """Refuse a size that is not one of `tensor_parallel_sizes`. Raises: SettingError, naming those that are."""
    if num_ranks < 1:
        raise SettingError(f"the tensor-parallel size is {num_ranks}; it must be at least 1")
    if reason := _reason(num_ranks, config, layers, expert_parallel):
        valid = tensor_parallel_sizes(config, layers, expert_parallel=expert_parallel)
        raise SettingError(
            f"tensor-parallel size {num_ranks}: {reason}; valid sizes: {', '.join(map(str, valid))}; {remedy}"
        )


def _reason(num_ranks: int, config: Mapping[str, Any], layers: Layers, expert_parallel: bool) -> str | None:
    """Return why the model does not split, None if it does."""
    heads, experts = config["num_attention_heads"], count_experts(config)
    if heads % num_ranks:
        return f"the dense model has {heads} query heads, and vLLM asks that they divide"
    if expert_parallel and num_ranks > experts:
        return f"every device needs an expert, and a layer has {experts}"
    if experts and not expert_parallel and dense_expert_size(config) % num_ranks:
        return f"a dense expert has {dense_expert_size(config)} channels, and vLLM asks that they divide"
    for index, layer in enumerate(layers(num_ranks) if callable(layers) else layers):
        if not layer.splits_over(num_ranks):
            groups = ", ".join(map(str, layer.query_heads_per_kv_head)) or "none"
            return (
                f"layer {index} does not split (query heads of each KV head: {groups}; "
                f"{layer.intermediate_size:,} channels)"
            )
    return None
