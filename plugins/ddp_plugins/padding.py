"""The widths a layer has inside vLLM: on disk they are compact, in memory some grow by a few zero rows.

vLLM gives every rank the same number of KV heads, query heads and MLP channels. What does not divide is filled up
with zero rows, which add nothing: a zero query head meets zero columns of `o_proj`, a zero channel a zero column of
`down_proj`. Matrix libraries ask for more: rows that start at round addresses, and few different widths. So MLP
channels are filled up to whole blocks on one rank as well; attention heads are not, they are round already.
Routed experts have storage and a kernel of ours: their shares may differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.widths import LayerWidths, tensor_parallel_sizes

CHANNEL_BLOCK = 64  # 128 bytes of 16-bit weights, what GPUs read at once
CPU_CHANNEL_BLOCK = 128  # every width is compiled for every new number of tokens: 30 widths become 9, not 14 (LOG)
MIN_WIDTH = 1024  # of a rank's share of the dense width; in a smaller model the zeros would weigh


def channel_block(config: Mapping[str, Any], num_ranks: int, *, can_pad: bool, on_cpu: bool) -> int:
    """Return what the number of MLP channels of every layer and rank is filled up to a multiple of; 1: nothing is.

    config: the checkpoint's, as plain data. Its `ddp_pad_channels_to` (`--hf-overrides`) goes before our own choice.
    can_pad: the weights may grow; quantised ones, and those that adapters are added to, may not.
    Raises: SettingError for a block that is no positive integer.
    """
    block = config.get("ddp_pad_channels_to")
    if block is None:
        ours = CPU_CHANNEL_BLOCK if on_cpu else CHANNEL_BLOCK
        block = ours if config["intermediate_size"] >= MIN_WIDTH * num_ranks else 1
    elif type(block) is not int or block < 1:
        raise SettingError(f"ddp_pad_channels_to is {block!r}; it must be a positive integer, 1 for no padding")
    return block if can_pad else 1


@dataclass(frozen=True, kw_only=True)
class FittedWidths:
    """What one decoder layer has over all ranks together; every KV head serves equally many query heads."""

    num_kv_heads: int
    query_heads_per_kv_head: int
    intermediate_size: int

    @property
    def num_query_heads(self) -> int:
        return self.num_kv_heads * self.query_heads_per_kv_head


def fit(widths: LayerWidths, num_ranks: int, block: int = 1) -> FittedWidths:
    """Return the smallest widths, at least `widths`, that vLLM can share out over `num_ranks`.

    block: every rank's number of channels is a multiple of it.
    """
    num_kv_heads, group = widths.num_kv_heads, max(widths.query_heads_per_kv_head, default=0)
    if num_kv_heads >= num_ranks:
        num_kv_heads = _round_up(num_kv_heads, num_ranks)
    elif num_kv_heads:  # several ranks hold a copy of the same KV head and share its query heads
        num_kv_heads = next(n for n in range(num_kv_heads, num_ranks + 1) if num_ranks % n == 0)
        group = _round_up(group, num_ranks // num_kv_heads)
    return FittedWidths(
        num_kv_heads=num_kv_heads,
        query_heads_per_kv_head=group,
        intermediate_size=_round_up(widths.intermediate_size, num_ranks * block),
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def check_ranks(layers: Sequence[LayerWidths], num_ranks: int, config: Mapping[str, Any], why: str) -> None:
    """Refuse a tensor-parallel size that would need padding where `why` forbids it.

    config: the checkpoint's, as plain data. Raises: SettingError, naming the first such layer and the sizes that work.
    """
    padded = next((index for index, widths in enumerate(layers) if not widths.splits_over(num_ranks)), None)
    if padded is None:
        return
    widths = layers[padded]
    raise SettingError(
        f"tensor_parallel_size={num_ranks} does not divide layer {padded} ({widths.num_kv_heads} KV heads for "
        f"{list(widths.query_heads_per_kv_head)} query heads, intermediate_size {widths.intermediate_size}), and "
        f"{why} cannot be padded; use one of {tensor_parallel_sizes(layers, config)}, or prune with a suitable --tp"
    )


def pad(name: str, tensor: torch.Tensor, widths: LayerWidths, fitted: FittedWidths, head_dim: int) -> torch.Tensor:
    """Return the weight or bias `name` of a layer at its fitted width, new rows or columns zero.

    tensor: compact, as on disk: `[out, in]` or `[out]`.
    """
    projection, kind = name.split(".")[-2:]
    blocks, size = _blocks(projection, widths, fitted, head_dim)
    axis = 1 if projection in ("o_proj", "down_proj") else 0
    if axis >= tensor.ndim or kind not in ("weight", "bias") or all(len(kept) == length for kept, length in blocks):
        return tensor
    pieces = []
    taken = 0
    for kept, length in blocks:
        compact = tensor.narrow(axis, taken * size, len(kept) * size).unflatten(axis, (len(kept), size))
        taken += len(kept)
        shape = list(compact.shape)
        shape[axis] = length
        piece = tensor.new_zeros(shape)
        places = slice(len(kept)) if isinstance(kept, range) else list(kept)  # a slice is copied several times as fast
        piece.movedim(axis, 0)[places] = compact.movedim(axis, 0)
        pieces.append(piece.flatten(axis, axis + 1))
    return torch.cat(pieces, axis)


def _blocks(
    projection: str, widths: LayerWidths, fitted: FittedWidths, head_dim: int
) -> tuple[list[tuple[Sequence[int], int]], int]:
    """Return, for each part of a projection, where its heads or channels go and among how many; and their size.

    A range starts at 0.
    """
    group = fitted.query_heads_per_kv_head
    places = [kv * group + head for kv, count in enumerate(widths.query_heads_per_kv_head) for head in range(count)]
    query = (places, fitted.num_query_heads)
    key = (range(widths.num_kv_heads), fitted.num_kv_heads)
    channel = (range(widths.intermediate_size), fitted.intermediate_size)
    if projection in ("gate_proj", "up_proj", "down_proj"):
        return [channel], 1
    if projection == "gate_up_proj":
        return [channel, channel], 1
    if projection in ("q_proj", "o_proj"):
        return [query], head_dim
    if projection in ("k_proj", "v_proj"):
        return [key], head_dim
    return ([query, key, key] if projection == "qkv_proj" else []), head_dim


def check_expert_ranks(num_ranks: int, *, num_experts: int, dense_width: int, is_expert_parallel: bool) -> None:
    """Refuse numbers of ranks that vLLM cannot share routed experts out over.

    dense_width: channels of an expert of the dense model. Raises: SettingError, naming what works.
    """
    if is_expert_parallel and num_ranks > num_experts:
        raise SettingError(
            f"--enable-expert-parallel over {num_ranks} ranks needs an expert for each, and a layer has {num_experts}; "
            f"use at most {num_experts} ranks"
        )
    if not is_expert_parallel and dense_width % num_ranks:
        valid = [n for n in range(1, num_ranks) if dense_width % n == 0]
        raise SettingError(
            f"tensor_parallel_size={num_ranks} does not divide the {dense_width} channels of a dense expert, "
            f"as vLLM asks; use one of {valid}, or --enable-expert-parallel"
        )


def share_channels(widths: Sequence[int], rank: int, num_ranks: int, block: int) -> list[range]:
    """Return the channels of each routed expert that one rank owns.

    block: channels are dealt in blocks of the kernel's alignment, so that all ranks together pad no more rows than
        one rank would. Blocks left over go to the ranks in turn, from expert to expert: no rank owns two more than
        another.
    """
    shares, first = [], 0  # first: whose turn it is
    for width in widths:
        each, left = divmod(-(-width // block), num_ranks)
        turn = (rank - first) % num_ranks
        start = each * turn + min(turn, left)
        stop = start + each + (turn < left)
        shares.append(range(min(start * block, width), min(stop * block, width)))
        first = (first + left) % num_ranks
    return shares
