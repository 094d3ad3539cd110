"""Zero-pads the compact tensors of a checkpoint to widths that vLLM can run, and divides experts
among the ranks.

vLLM gives every rank the same number of KV heads, query heads and MLP channels. Widths that cannot
be divided are zero-padded. The padding adds nothing: a zero query head meets zero columns of
`o_proj`, a zero channel a zero column of `down_proj`. Matrix libraries also run faster on aligned
rows and few distinct widths, so MLP channels are padded to whole blocks on one rank too. Attention
heads are aligned already. Routed experts use our own storage and kernel, so ranks may own different
shares of them.
"""

from collections.abc import Sequence

import torch

from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.tensors import Config
from ddp_vllm.remote_code.widths import LayerWidths, Widths
from ddp_vllm.tensor_parallel import CPU_CHANNEL_BLOCK, padded_widths

CHANNEL_BLOCK = 64  # 128 bytes of 16-bit weights, what GPUs read at once
# of a rank's share of the dense width; in smaller models the padding costs more than it saves
MIN_WIDTH = 1024


def channel_block(config: Config, num_ranks: int, *, can_pad: bool, on_cpu: bool) -> int:
    """Choose the block size: each rank's MLP channels are padded to a multiple of it, and 1
    disables padding.

    config: the checkpoint's fields. Its `ddp_pad_channels_to` (`--hf-overrides`) overrides our
        choice.
    can_pad: whether the weights may grow; weights quantized on disk and weights with adapters may
        not.
    Raises: SettingError for a block that is not a positive integer.
    """
    block = config.get("ddp_pad_channels_to")
    if block is None:
        ours = CPU_CHANNEL_BLOCK if on_cpu else CHANNEL_BLOCK
        block = ours if config["intermediate_size"] >= MIN_WIDTH * num_ranks else 1
    elif type(block) is not int or block < 1:
        raise SettingError(f"ddp_pad_channels_to is {block!r}; it must be a positive integer, 1 for no padding")
    return block if can_pad else 1


def pad(name: str, tensor: torch.Tensor, widths: Widths, num_ranks: int, block: int = 1) -> torch.Tensor:
    """Zero-pad a tensor from its compact shape to the shape its layer has in memory.

    On one rank attention stays compact: only the kernel requires even heads there
    (`dense.UnevenHeads`).
    name: as on disk. tensor: compact, with a shape that `widths` has checked. block: as in `padded_widths`.
    """
    if (place := widths.find(name)) is None or place.length is None:
        return tensor
    projection, layer = place.projection, widths.layers[place.layer]
    if projection.block == "attn" and num_ranks == 1:
        return tensor
    fitted = padded_widths(layer, num_ranks, block)
    if all(fitted.num_units(unit) == layer.num_units(unit) for unit in projection.units):
        return tensor
    axis, size = place.axis, projection.unit_size(widths.head_dim)
    runs = tensor.split([layer.num_units(unit) * size for unit in projection.units], axis)
    spread = [
        _spread(run.unflatten(axis, (-1, size)), axis, _padded_indices(unit, layer, fitted), fitted.num_units(unit))
        for unit, run in zip(projection.units, runs, strict=True)
    ]
    return torch.cat(spread, axis)


def _padded_indices(unit: str, layer: LayerWidths, fitted: LayerWidths) -> Sequence[int]:
    """Return the index of each unit among the padded ones; a query head keeps its KV head."""
    if unit != "query_head":
        return range(layer.num_units(unit))
    queries_per_kv = max(fitted.query_heads_per_kv_head, default=0)
    counts = enumerate(layer.query_heads_per_kv_head)
    return [kv_head * queries_per_kv + head for kv_head, count in counts for head in range(count)]


def _spread(units: torch.Tensor, axis: int, indices: Sequence[int], length: int) -> torch.Tensor:
    """Scatter the units along `axis` to `indices` among `length` zeros, then merge `axis` and the
    next axis."""
    shape = list(units.shape)
    shape[axis] = length
    wide = units.new_zeros(shape)
    # copying a slice is much faster
    chosen = slice(len(indices)) if isinstance(indices, range) else list(indices)
    wide.movedim(axis, 0)[chosen] = units.movedim(axis, 0)
    return wide.flatten(axis, axis + 1)


def share_channels(widths: Sequence[int], rank: int, num_ranks: int, block: int) -> list[range]:
    """Return the channels of each routed expert that one rank owns.

    Channels are divided in blocks of the kernel's alignment, so all ranks together pad as few rows
    as one rank would. Remaining blocks are given to the ranks in turn: their numbers of blocks
    differ by at most one.
    """
    shares, first = [], 0  # first: the rank that receives the next remaining block
    for width in widths:
        each, left = divmod(-(-width // block), num_ranks)
        turn = (rank - first) % num_ranks
        start = each * turn + min(turn, left)
        stop = start + each + (turn < left)
        shares.append(range(min(start * block, width), min(stop * block, width)))
        first = (first + left) % num_ranks
    return shares
