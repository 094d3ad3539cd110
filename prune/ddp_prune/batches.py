"""What a step learns from: blocks of text in a fixed order, and what the dense model makes of them.

Legend: B sequences of a micro-batch, H hidden size.
"""

from collections.abc import Iterator

import torch
from accelerate import Accelerator

from ddp_prune.gates import GatedModel
from ddp_prune.perplexity import final_hidden
from ddp_prune.recipe import Recipe

TEACHER_CACHE_BYTES = 4 << 30  # of a process's host memory, for hidden states of text that is gone over again


class Batches:
    """Deterministic micro-batches; which sequences make a step does not depend on the number of processes."""

    def __init__(self, blocks: torch.Tensor, recipe: Recipe, accelerator: Accelerator) -> None:
        self.blocks, self.size, self.accelerator = blocks, recipe.batch_size, accelerator
        in_flight = 8192 if accelerator.device.type == "cuda" else 1024  # tokens a forward pass
        share = -(-recipe.batch_size // accelerator.num_processes)  # of a step's sequences
        self.micro = recipe.micro_batch_size or min(share, max(1, in_flight // recipe.seq_len))
        self.repeats = recipe.steps * recipe.batch_size > len(blocks)

    def step(self, step: int) -> Iterator[list[int]]:
        """Yield the block numbers of this process's micro-batches."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        mine = [(step * self.size + i) % len(self.blocks) for i in range(rank, self.size, world)]
        for start in range(0, len(mine), self.micro):
            yield mine[start : start + self.micro]


class Teacher:
    """Final hidden states of the dense model; kept in host memory if the same text comes again and fits."""

    def __init__(self, gated: GatedModel, batches: Batches) -> None:
        self.gated = gated
        num_bytes = batches.blocks.numel() * gated.sizes.hidden_size * next(gated.model.parameters()).dtype.itemsize
        self.cache: dict[int, torch.Tensor] | None = None
        world = batches.accelerator.num_processes
        # only then does a block come back to the same process, and all hit or miss together, as shared weights ask
        shared = len(batches.blocks) % world == 0 and batches.size % world == 0
        if batches.repeats and shared and num_bytes <= TEACHER_CACHE_BYTES * world:
            self.cache = {}

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        """Return [B·(seq_len−1), H] for the blocks `numbers`, which `tokens` holds."""
        if self.cache is not None and all(number in self.cache for number in numbers):
            states = torch.stack([self.cache[number] for number in numbers]).to(tokens.device)
            return states.flatten(0, 1)
        states = final_hidden(self.gated.model, tokens)
        if self.cache is not None:
            for number, state in zip(numbers, states.unflatten(0, (len(numbers), -1)), strict=True):
                self.cache[number] = state.cpu()
        return states
