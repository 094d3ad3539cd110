"""Micro-batches of token blocks, and the dense model's hidden states for them.

Legend: B sequences of a micro-batch, H hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from ddp_prune.core.loss import final_hidden
from ddp_prune.core.schedule import Schedule

# host memory per process for hidden states of text that is read more than once
TEACHER_CACHE_BYTES = 4 << 30


def usual_sequences(batch_size: int, seq_len: int, num_devices: int, device_type: str) -> int:
    """Return the sequences of a forward pass before they are fitted to memory: about 8,192 tokens,
    1,024 on a CPU."""
    tokens = 8192 if device_type == "cuda" else 1024
    return min(-(-batch_size // num_devices), max(1, tokens // seq_len))


class MicroBatch(NamedTuple):
    """The sequences of one forward pass, on the device."""

    numbers: list[int]
    """Of its blocks."""
    tokens: Tensor
    """int64 [B, seq_len]."""
    labels_N: Tensor
    """int64 [B·(seq_len−1)]: the predicted tokens."""
    loss_mask_N: Tensor | None
    """float32 [B·(seq_len−1)]: the loss mask divided by its mean over the step, so that the mean of
    the masked losses is the mean over the tokens in the loss mask; None: all tokens."""
    share: float
    """Of the sequences of its step, over all processes."""


class Batches:
    """Deterministic micro-batches. The sequences of a step do not depend on the number of
    processes."""

    def __init__(
        self,
        blocks: Tensor,
        schedule: Schedule,
        accelerator: Accelerator,
        loss_mask: Tensor | None = None,
    ) -> None:
        """Divide the blocks into steps of `schedule.batch_size` blocks.

        blocks: int64 [num_blocks, seq_len].
        loss_mask: bool, shaped as `blocks`: the tokens that contribute to the cross-entropy; None
            means all of them.
        """
        self.blocks, self.size, self.accelerator, self.loss_mask = blocks, schedule.batch_size, accelerator, loss_mask
        self.seq_len = blocks.shape[1]
        number, kind = accelerator.num_processes, accelerator.device.type
        self.micro_batch_size = schedule.num_sequences or usual_sequences(self.size, self.seq_len, number, kind)
        self.repeats = schedule.steps.last * self.size > len(blocks)

    def numbers(self, step: int) -> list[int]:
        """Return the block numbers of a step, over all processes."""
        return [(step * self.size + i) % len(self.blocks) for i in range(self.size)]

    def loss_share(self, step: int) -> float:
        """Return the share of a step's predicted tokens that contribute to the cross-entropy, in
        (0, 1]."""
        if self.loss_mask is None:
            return 1.0
        loss_mask_BT = self.loss_mask[self.numbers(step), 1:]
        return max(1, int(loss_mask_BT.sum())) / loss_mask_BT.numel()

    def step(self, step: int) -> Iterator[MicroBatch]:
        """Yield this process's micro-batches of a step."""
        device, loss_share = self.accelerator.device, self.loss_share(step)
        local = self.numbers(step)[self.accelerator.process_index :: self.accelerator.num_processes]
        for start in range(0, len(local), self.micro_batch_size):
            numbers = local[start : start + self.micro_batch_size]
            tokens, loss_mask_N = self.blocks[numbers].to(device), None
            if self.loss_mask is not None:
                loss_mask_N = (self.loss_mask[numbers, 1:].flatten().float() / loss_share).to(device)
            labels_N = tokens[:, 1:].reshape(-1)
            yield MicroBatch(numbers, tokens, labels_N, loss_mask_N, len(numbers) / self.size)


class Teacher:
    """Final hidden states of the dense model, cached in host memory if text is read more than once
    and they fit."""

    def __init__(
        self, model: Any, batches: Batches, adapters_disabled: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Cache what fits. adapters_disabled: a context in which a model that is trained computes
        as the dense one."""
        self.model, self.adapters_disabled = model, adapters_disabled
        num_bytes = batches.blocks.numel() * model.config.get_text_config().hidden_size * model.dtype.itemsize
        self.cache: dict[int, Tensor] | None = None
        world = batches.accelerator.num_processes
        # Otherwise a block would be read by another process than the one that cached it. With
        # sharded weights, all processes must also hit or miss together.
        divisible = len(batches.blocks) % world == 0 and batches.size % world == 0
        if batches.repeats and divisible and num_bytes <= TEACHER_CACHE_BYTES * world:
            self.cache = {}

    @torch.no_grad()
    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return [B·(seq_len−1), H] for a micro-batch."""
        numbers, tokens = batch.numbers, batch.tokens
        if self.cache is not None and all(number in self.cache for number in numbers):
            states = torch.stack([self.cache[number] for number in numbers]).to(tokens.device)
            return states.flatten(0, 1)
        states = self.states(tokens)
        if self.cache is not None:
            for number, state in zip(numbers, states.unflatten(0, (len(numbers), -1)), strict=True):
                self.cache[number] = state.cpu()
        return states

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor:
        """Return [B·(seq_len−1), H] for any tokens, int64 [B, seq_len]."""
        with self.adapters_disabled():
            return final_hidden(self.model, tokens)
