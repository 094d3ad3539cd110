"""How well the model predicts text, dense or with masks on.

Legend: B sequences of a batch, H hidden size.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_prune.objective import OutputHead, negative_log_likelihood


def final_hidden(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the hidden states that predict the next tokens: [B·(seq_len−1), H], after the last norm."""
    hidden = model.get_decoder()(tokens, use_cache=False).last_hidden_state
    return hidden[:, :-1].reshape(-1, hidden.shape[-1])


@torch.no_grad()
def block_losses(gated: GatedModel, masks: Masks | None, blocks: torch.Tensor) -> list[float]:
    """Return the mean next-token loss of each block (int64 [num_blocks, seq_len]) on its own, in nats a token."""
    model: Any = gated.model
    head = OutputHead.of(model)
    device, predicted = head.weight.device, blocks.shape[1] - 1
    with gated.masks(masks and {kind: mask.to(device) for kind, mask in masks.items()}):
        return [
            negative_log_likelihood(final_hidden(model, tokens[None]), head, tokens[1:]) / predicted
            for tokens in blocks.to(device)
        ]


def perplexity(gated: GatedModel, masks: Masks | None, blocks: torch.Tensor) -> float:
    """Return `perplexity_of` the `block_losses`."""
    return perplexity_of(block_losses(gated, masks, blocks))


def perplexity_of(losses: Sequence[float]) -> float:
    """Return exp of the mean loss in nats a token; infinite where a float cannot hold it."""
    mean = statistics.fmean(losses)
    return math.exp(mean) if mean < 700 else math.inf
