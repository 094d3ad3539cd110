"""Cross-entropy, distillation and perplexity, in chunks: the logits of a batch never exist at once.

Legend: B sequences of a batch, N predicted tokens, H hidden size, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ddp_prune.gates import GatedModel, Masks
from ddp_vllm.evaluations import mean_loss

# Of one float32 copy of logits; logits and probabilities of student and teacher are four. Smaller chunks are slower on
# a CPU (log 54); a GPU wants some 300 tokens a product to be busy with arithmetic rather than with reading the head.
CHUNK_BYTES, GPU_CHUNK_BYTES = 20 << 20, 256 << 20


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """How a model makes logits of its final hidden states: c·tanh(W h / (d·c)), or W h / d without a cap."""

    weight: torch.Tensor
    """[V, H], the output embedding."""
    divisor: float = 1.0
    """d: Granite's `logits_scaling`."""
    cap: float | None = None
    """c: Gemma's `final_logit_softcapping`."""

    @classmethod
    def of(cls, model: Any) -> "OutputHead":
        """Read the head of a stock transformers model."""
        config = model.config
        return cls(
            weight=model.get_output_embeddings().weight,
            divisor=getattr(config, "logits_scaling", None) or 1.0,
            cap=getattr(config, "final_logit_softcapping", None),
        )

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return float32 [N, V]."""
        logits = F.linear(hidden_NH, self.weight).float()
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def pull_back(self, gradient_NV: torch.Tensor, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return [N, H]: the gradient of the logits taken back to the hidden states; overwrites the logits."""
        if self.cap is not None:  # the slope of the cap is 1 − (logit / c)²
            gradient_NV = gradient_NV * logits_NV.div_(self.cap).square_().neg_().add_(1.0)
        return gradient_NV.to(self.weight.dtype) @ self.weight / self.divisor


def chunk_tokens(weight_VH: torch.Tensor) -> int:
    """Return how many tokens' float32 logits fit into a chunk on the device of the head; at least 16."""
    size = CHUNK_BYTES if weight_VH.device.type == "cpu" else GPU_CHUNK_BYTES
    return max(16, size // (4 * len(weight_VH)))


def head_bytes(model: Any) -> int:
    """Return about how many bytes the head takes beside its weights: logits and probabilities of two models, and one
    copy in the making."""
    weight_VH = OutputHead.of(model).weight
    return 5 * 4 * chunk_tokens(weight_VH) * len(weight_VH)


def _softmax(logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax [N, V] and log Σ exp [N]: one pass of exponentials, where log-softmax and exp are two."""
    p = logits_NV.softmax(-1)
    return p, logits_NV.amax(-1) - p.amax(-1).log()


class _DistilledHead(torch.autograd.Function):
    """mean(CE + η·KL(teacher‖student)) over tokens, and its gradient for the hidden states, in one pass over chunks.

    With target q = (onehot + η·p_teacher)/(1 + η) the gradient of the logits is (1 + η)(p_student − q); forward
    already takes it back through the head, so nothing of size V is kept for backward. With weights w of the labels it
    is (w + η)·p_student − w·onehot − η·p_teacher.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student_NH: torch.Tensor,
        teacher_NH: torch.Tensor | None,
        head: OutputHead,
        teacher_head: OutputHead,
        labels_N: torch.Tensor,
        eta: float,
        loss_mask_N: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = student_NH.shape[0]
        gradient_NH = torch.empty_like(student_NH)
        cross_entropy = torch.zeros((), device=student_NH.device)
        divergence = torch.zeros((), device=student_NH.device)
        distil = teacher_NH is not None and eta > 0
        size = chunk_tokens(head.weight)
        for start in range(0, num_tokens, size):
            chunk = slice(start, start + size)
            logits, labels = head.logits(student_NH[chunk]), labels_N[chunk, None]
            p, log_z = _softmax(logits)
            losses = log_z - logits.gather(1, labels)[:, 0]
            gradient, share = p, 1.0 / (1.0 + eta) if distil else 1.0  # share: of the labels in the target q
            if loss_mask_N is not None:
                losses, weights, share = losses * loss_mask_N[chunk], loss_mask_N[chunk, None], 1.0
            cross_entropy += losses.sum()
            if distil and teacher_NH is not None:
                teacher = teacher_head.logits(teacher_NH[chunk])
                t, log_z_teacher = _softmax(teacher)
                # KL = Σ t (log t − log p), the logarithms taken apart into logits and normalisers
                divergence += teacher.sub_(logits).mul_(t).sum() + (log_z - log_z_teacher).sum()
                if loss_mask_N is None:
                    gradient = p.sub_(t, alpha=1.0 - share)
                else:
                    gradient = p.mul_(weights + eta).sub_(t, alpha=eta)
                del teacher, t  # before the gradient is rounded and taken back
            elif loss_mask_N is not None:
                gradient = p.mul_(weights)
            onehot = torch.full_like(labels, -share, dtype=gradient.dtype)
            gradient.scatter_add_(1, labels, onehot if loss_mask_N is None else -weights)
            gradient_NH[chunk] = head.pull_back(gradient, logits) / (share * num_tokens)
        ctx.save_for_backward(gradient_NH)
        metrics = torch.stack([cross_entropy, divergence]) / num_tokens
        ctx.mark_non_differentiable(metrics)
        return metrics[0] + eta * metrics[1], metrics

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_NH,) = ctx.saved_tensors
        return gradient_NH * gradients[0].to(gradient_NH.dtype), None, None, None, None, None, None


def distilled_loss(
    student_NH: torch.Tensor,
    teacher_NH: torch.Tensor | None,
    head: OutputHead,
    labels_N: torch.Tensor,
    eta: float,
    teacher_head: OutputHead | None = None,
    loss_mask_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float, float]:
    """Return (mean w·CE + η·KL, mean w·CE, mean KL) in nats a token (Eq. 16 and 17; w is 1 without `loss_mask_N`).

    `student_NH` and `teacher_NH` are final hidden states [N, H] after the last norm, `labels_N` int64 [N]. The first
    value is differentiable in `student_NH` only; the KL is exact, over the whole vocabulary. `teacher_NH=None` leaves
    the distillation out. Both models have the same `head`, unless the teacher has one of its own.
    """
    arguments = (student_NH, teacher_NH, head, teacher_head or head, labels_N, eta, loss_mask_N)
    loss, metrics = _DistilledHead.apply(*arguments)
    cross_entropy, divergence = metrics.tolist()
    return loss, cross_entropy, divergence


@torch.no_grad()
def negative_log_likelihood(hidden_NH: torch.Tensor, head: OutputHead, labels_N: torch.Tensor) -> float:
    """Return the summed cross-entropy of the labels in nats, in chunks; shapes as `distilled_loss`."""
    total, size = 0.0, chunk_tokens(head.weight)
    for hidden, labels in zip(hidden_NH.split(size), labels_N.split(size), strict=True):
        total += F.cross_entropy(head.logits(hidden), labels, reduction="sum").item()
    return total


def final_hidden(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the hidden states that predict the next tokens: [B·(seq_len−1), H], after the last norm."""
    hidden = model.get_decoder()(tokens, use_cache=False).last_hidden_state
    return hidden[:, :-1].reshape(-1, hidden.shape[-1])


def block_losses(gated: GatedModel, masks: Masks | None, blocks: torch.Tensor) -> list[float]:
    """Return the `losses` of a gated model under `masks`; None: the dense model."""
    model: Any = gated.model
    device = OutputHead.of(model).weight.device
    with gated.masks(masks and {kind: mask.to(device) for kind, mask in masks.items()}):
        return losses(model, blocks)


@torch.no_grad()
def losses(model: Any, blocks: torch.Tensor) -> list[float]:
    """Return the mean next-token loss of each block (int64 [num_blocks, seq_len]) on its own, in nats a token."""
    head, predicted = OutputHead.of(model), blocks.shape[1] - 1
    return [
        negative_log_likelihood(final_hidden(model, tokens[None]), head, tokens[1:]) / predicted
        for tokens in blocks.to(head.weight.device)
    ]


@torch.no_grad()
def agreement(
    hidden_NH: torch.Tensor, head: OutputHead, teacher_NH: torch.Tensor, teacher_head: OutputHead
) -> tuple[float, int]:
    """Return the summed KL(teacher‖student) in nats, over the whole vocabulary, and for how many tokens both models
    hold the same next one likeliest; shapes as `distilled_loss`."""
    divergence, alike, size = 0.0, 0, chunk_tokens(head.weight)
    for hidden, teacher in zip(hidden_NH.split(size), teacher_NH.split(size), strict=True):
        logits, wanted = head.logits(hidden), teacher_head.logits(teacher)
        alike += int((logits.argmax(-1) == wanted.argmax(-1)).sum())
        t, log_z_teacher = _softmax(wanted)
        log_z = torch.logsumexp(logits, -1)
        divergence += (wanted.sub_(logits).mul_(t).sum() + (log_z - log_z_teacher).sum()).item()
    return divergence, alike


def perplexity(gated: GatedModel, masks: Masks | None, blocks: torch.Tensor) -> float:
    """Return `perplexity_of` the `block_losses`."""
    return perplexity_of(block_losses(gated, masks, blocks))


def perplexity_of(block_losses: Sequence[float], block_tokens: Sequence[int] | None = None) -> float:
    """Return exp of the `mean_loss` in nats per token; infinite where a float cannot hold it."""
    mean, _ = mean_loss(block_losses, block_tokens)
    return math.exp(mean) if mean < 700 else math.inf
