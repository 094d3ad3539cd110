"""The tensor-parallel sizes of a model, and the widths that devices can share: one rule, and one
error message that names the valid sizes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ddp_vllm.dimensions import dimensions_of
from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.tensors import Config
from ddp_vllm.remote_code.widths import LayerWidths

# the plugin packs experts in blocks of this many channels: the smallest tile of a tensor core, and 32
# bytes of a bf16 column
EXPERT_BLOCK = 16
# the largest block to which the plugin pads MLPs: oneDNN compiles a kernel per width and batch size, so
# fewer widths shorten the first batches
CPU_CHANNEL_BLOCK = 128
Layers = Sequence[LayerWidths] | Callable[[int], Sequence[LayerWidths]]
"""The layers that must split without padding, or a function that returns them for a number of
devices."""


def tensor_parallel_sizes(config: Config, layers: Layers = (), *, expert_parallel: bool = False) -> list[int]:
    """Return the tensor-parallel sizes at which vLLM accepts the model and none of `layers` needs
    padding.

    vLLM requires a divisor of the dense model's number of query heads and of its experts' channels,
    or with `expert_parallel` at least one expert per device.

    config: as plain data, dense or pruned.
    """
    heads = dimensions_of(config).num_query_heads
    return [size for size in range(1, heads + 1) if _reason(size, config, layers, expert_parallel) is None]


def check_tensor_parallel(
    num_ranks: int,
    config: Config,
    layers: Layers = (),
    *,
    expert_parallel: bool = False,
    remedy: str = "choose one of them",
) -> None:
    """Refuse a size that is not one of `tensor_parallel_sizes`.

    remedy: the advice at the end of the error message, after the valid sizes.

    Raises: SettingError, which names the part that does not split and the valid sizes.
    """
    if num_ranks < 1:
        raise SettingError(f"the tensor-parallel size is {num_ranks}; it must be at least 1")
    if reason := _reason(num_ranks, config, layers, expert_parallel):
        valid = ", ".join(map(str, tensor_parallel_sizes(config, layers, expert_parallel=expert_parallel)))
        raise SettingError(f"tensor-parallel size {num_ranks} {reason}; valid sizes: {valid}; {remedy}")


def _reason(num_ranks: int, config: Config, layers: Layers, expert_parallel: bool) -> str | None:
    """Return why the size is invalid, as the predicate of a sentence; None if the model splits."""
    sizes = dimensions_of(config)
    heads, experts = sizes.num_query_heads, sizes.num_experts
    if heads % num_ranks:
        return f"does not divide the {heads} query heads of the dense model, as vLLM requires"
    if expert_parallel and num_ranks > experts:
        return f"requires an expert for each device, and a layer has {experts}"
    if experts and not expert_parallel and sizes.expert_intermediate_size % num_ranks:
        return f"does not divide the {sizes.expert_intermediate_size:,} channels of a dense expert, as vLLM requires"
    for index, layer in enumerate(layers(num_ranks) if callable(layers) else layers):
        if num_ranks > 1 and padded_widths(layer, num_ranks) != layer:
            return (
                f"does not split layer {index} without padding ({layer.num_kv_heads} KV heads for "
                f"{list(layer.query_heads_per_kv_head)} query heads, {layer.intermediate_size:,} channels)"
            )
    return None


def padded_widths(widths: LayerWidths, num_ranks: int, block: int = 1) -> LayerWidths:
    """Return the smallest widths, at least `widths`, that vLLM can divide among `num_ranks` ranks.

    Every KV head then serves equally many query heads. Experts may have any width. block: each
    rank's number of channels is a multiple of it.
    """
    num_kv_heads, queries_per_kv = widths.num_kv_heads, max(widths.query_heads_per_kv_head, default=0)
    if num_kv_heads >= num_ranks:
        num_kv_heads = round_up(num_kv_heads, num_ranks)
    elif num_kv_heads:  # ranks that share a KV head hold a copy each and divide its query heads
        num_kv_heads = next(n for n in range(num_kv_heads, num_ranks + 1) if num_ranks % n == 0)
        queries_per_kv = round_up(queries_per_kv, num_ranks // num_kv_heads)
    return replace(
        widths,
        query_heads_per_kv_head=(queries_per_kv,) * num_kv_heads,
        intermediate_size=round_up(widths.intermediate_size, num_ranks * block),
    )


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `number`."""
    return -(-number // multiple) * multiple
