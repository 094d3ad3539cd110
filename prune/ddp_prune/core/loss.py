"""Cross-entropy, distillation and perplexity, in chunks: the logits of a batch never exist at once.

Legend: B sequences of a batch, N predicted tokens, H hidden size, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_prune.core.decoder import decoder_of
from ddp_vllm.intervals import mean_loss

# Bytes of one float32 copy of a chunk's logits. Logits and probabilities of student and teacher are
# four copies. Smaller chunks are slower on a CPU. A GPU requires about 300 tokens per product to be
# limited by arithmetic and not by reading the head.
CHUNK_BYTES, GPU_CHUNK_BYTES = 20 << 20, 256 << 20


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """How a model computes logits from final hidden states h: (W h + b) / d = l, or c·tanh(l / c)
    with a cap c."""

    weight: Tensor
    """[V, H], the output embedding."""
    divisor: float = 1.0
    """d: Granite's `logits_scaling`, or the inverse of Cohere's `logit_scale` and Falcon-H1's
    `lm_head_multiplier`."""
    cap: float | None = None
    """c: Gemma's `final_logit_softcapping`."""
    bias: Tensor | None = None
    """b, [V]."""

    @classmethod
    def of(cls, model: Any) -> "OutputHead":
        """Read the head of a stock transformers model."""
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
        return cls(
            weight=head.weight,
            divisor=getattr(config, "logits_scaling", None) or (1.0 / scale if scale else 1.0),
            cap=getattr(config, "final_logit_softcapping", None),
            bias=getattr(head, "bias", None),
        )

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return float32 [N, V]."""
        logits = F.linear(hidden_NH, self.weight, self.bias).float()
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def pull_back(self, gradient_NV: Tensor, logits_NV: Tensor) -> Tensor:
        """Return [N, H]: the gradient of the hidden states from that of the logits; overwrites the
        logits."""
        if self.cap is not None:  # the slope of the cap is 1 − (logit / c)²
            gradient_NV = gradient_NV * logits_NV.div_(self.cap).square_().neg_().add_(1.0)
        return gradient_NV.to(self.weight.dtype) @ self.weight / self.divisor


def chunk_tokens(head: OutputHead, device: torch.device | None = None) -> int:
    """Return how many tokens' float32 logits fit into a chunk on a device, by default the head's;
    at least 16."""
    size = CHUNK_BYTES if (device or head.weight.device).type == "cpu" else GPU_CHUNK_BYTES
    return max(16, size // (4 * len(head.weight)))


def head_bytes(model: Any, device: torch.device) -> int:
    """Estimate the bytes that the head requires on top of its weights, for one chunk.

    On a CPU: logits, probabilities of two models and a copy, in float32. On a GPU: the products of
    both models.
    """
    head = OutputHead.of(model)
    bytes_each = 5 * 4 if device.type == "cpu" else 2 * head.weight.dtype.itemsize
    return bytes_each * chunk_tokens(head, device) * len(head.weight)


def _softmax(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax [N, V] and log Σ exp [N] with one pass of exponentials; log-softmax and exp
    would need two."""
    p = logits_NV.softmax(-1)
    return p, logits_NV.amax(-1) - p.amax(-1).log()


def _divergence(teacher_NV: Tensor, logits_NV: Tensor, log_z_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the teacher's softmax [N, V] and the summed KL(teacher‖student); overwrites the
    teacher's logits.

    log_z_N: log Σ exp of the student's logits.
    """
    t, log_z_teacher_N = _softmax(teacher_NV)
    # KL = Σ t (log t − log p), with each logarithm written as a logit minus its normalizer
    return t, teacher_NV.sub_(logits_NV).mul_(t).sum() + (log_z_N - log_z_teacher_N).sum()


class _DistilledHead(torch.autograd.Function):
    """mean(w·CE + η·KL(teacher‖student)) over tokens, and its gradient for the hidden states, in
    one pass over chunks.

    The gradient of a token's logits is (w + η)·p_student − η·p_teacher − w·onehot, where w is its
    loss mask. Forward already multiplies it by the head, so nothing of size V is kept for backward.
    Without a loss mask w is 1, and the factor 1 + η moves behind the head: p_student − (η·p_teacher
    + onehot) / (1 + η), one pass over V less.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student_NH: Tensor,
        teacher_NH: Tensor | None,
        head: OutputHead,
        teacher_head: OutputHead,
        labels_N: Tensor,
        eta: float,
        loss_mask_N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = student_NH.shape[0]
        scale = 1.0 / (1.0 + eta) if loss_mask_N is None else 1.0  # of the gradient of the logits
        gradient_NH = torch.empty_like(student_NH)
        cross_entropy = torch.zeros((), device=student_NH.device)
        divergence = torch.zeros((), device=student_NH.device)
        size = chunk_tokens(head)
        for start in range(0, num_tokens, size):
            chunk = slice(start, start + size)
            if student_NH.is_cuda:
                sums, gradient_NH[chunk] = _chunk_on_gpu(
                    student_NH[chunk], None if teacher_NH is None else teacher_NH[chunk], head, teacher_head,
                    labels_N[chunk], eta, scale, None if loss_mask_N is None else loss_mask_N[chunk], num_tokens,
                )  # fmt: skip
                cross_entropy, divergence = cross_entropy + sums[0], divergence + sums[1]
                continue
            logits, labels = head.logits(student_NH[chunk]), labels_N[chunk, None]
            gradient, log_z = _softmax(logits)
            losses = log_z - logits.gather(1, labels)[:, 0]
            mask = torch.ones_like(losses) if loss_mask_N is None else loss_mask_N[chunk]
            cross_entropy += (losses * mask).sum()
            if loss_mask_N is not None:
                gradient.mul_(mask[:, None] + eta)
            if teacher_NH is not None and eta > 0:
                t, sum_of_chunk = _divergence(teacher_head.logits(teacher_NH[chunk]), logits, log_z)
                divergence += sum_of_chunk
                gradient.sub_(t, alpha=scale * eta)
                del t  # before the gradient is rounded and multiplied by the head
            gradient.scatter_add_(1, labels, mask[:, None] * -scale)
            gradient_NH[chunk] = head.pull_back(gradient, logits) / (scale * num_tokens)
        ctx.save_for_backward(gradient_NH)
        metrics = torch.stack([cross_entropy, divergence]) / num_tokens
        ctx.mark_non_differentiable(metrics)
        return metrics[0] + eta * metrics[1], metrics

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_NH,) = ctx.saved_tensors
        return gradient_NH * gradients[0].to(gradient_NH.dtype), None, None, None, None, None, None


def _chunk_on_gpu(
    student_NH: Tensor, teacher_NH: Tensor | None, head: OutputHead, teacher_head: OutputHead,
    labels_N: Tensor, eta: float, scale: float, loss_mask_N: Tensor | None, num_tokens: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the sums of w·CE and KL of a chunk, and the gradient of its hidden states: the same by
    one kernel."""
    from ddp_prune.core.kernels import distill_chunk

    product_NV = F.linear(student_NH, head.weight, head.bias)
    teacher_NV = None
    if teacher_NH is not None and eta > 0:
        teacher_NV = F.linear(teacher_NH, teacher_head.weight, teacher_head.bias)
    sums = distill_chunk(
        product_NV, teacher_NV, labels_N, loss_mask_N, eta, scale,
        divisors=(head.divisor, teacher_head.divisor), caps=(head.cap, teacher_head.cap),
    )  # fmt: skip
    return sums, product_NV @ head.weight / (head.divisor * scale * num_tokens)


def distill(
    student_NH: Tensor,
    teacher_NH: Tensor | None,
    head: OutputHead,
    labels_N: Tensor,
    eta: float,
    teacher_head: OutputHead | None = None,
    loss_mask_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return mean w·CE + η·KL in nats per token, and the tensor [mean w·CE, mean KL].

    student_NH, teacher_NH: final hidden states after the last norm; without a teacher, η is 0.
    labels_N: int64.
    teacher_head: None means that both models share `head`.
    loss_mask_N: w, float32, as `MicroBatch.loss_mask_N` holds it; None means 1.
    The first value is differentiable in `student_NH` only. The KL is exact, over the whole
    vocabulary.
    """
    eta = 0.0 if teacher_NH is None else eta
    loss_and_metrics: tuple[Tensor, Tensor] = _DistilledHead.apply(
        student_NH, teacher_NH, head, teacher_head or head, labels_N, eta, loss_mask_N
    )
    return loss_and_metrics


@torch.no_grad()
def negative_log_likelihood(hidden_NH: Tensor, head: OutputHead, labels_N: Tensor) -> float:
    """Return the summed cross-entropy of the labels in nats, in chunks; shapes as in `distill`."""
    total, size = 0.0, chunk_tokens(head)
    for hidden, labels in zip(hidden_NH.split(size), labels_N.split(size), strict=True):
        total += F.cross_entropy(head.logits(hidden), labels, reduction="sum").item()
    return total


def final_hidden(model: Any, tokens: Tensor) -> Tensor:
    """Return the hidden states that predict the next tokens: [B·(seq_len−1), H], after the last
    norm."""
    hidden = decoder_of(model)(tokens, use_cache=False).last_hidden_state
    return hidden[:, :-1].reshape(-1, hidden.shape[-1])


@torch.no_grad()
def agreement(hidden_NH: Tensor, head: OutputHead, teacher_NH: Tensor, teacher_head: OutputHead) -> tuple[float, int]:
    """Return the summed KL(teacher‖student) in nats, and the number of tokens with top-1 agreement;
    shapes as in `distill`."""
    divergence, agreeing, size = 0.0, 0, chunk_tokens(head)
    for hidden, teacher in zip(hidden_NH.split(size), teacher_NH.split(size), strict=True):
        logits, teacher_logits = head.logits(hidden), teacher_head.logits(teacher)
        agreeing += int((logits.argmax(-1) == teacher_logits.argmax(-1)).sum())
        divergence += _divergence(teacher_logits, logits, torch.logsumexp(logits, -1))[1].item()
    return divergence, agreeing


def perplexity_of(block_losses: Sequence[float], block_tokens: Sequence[int] | None = None) -> float:
    """Return exp of the `mean_loss` in nats per token; infinite where a float cannot hold it."""
    mean, _ = mean_loss(block_losses, block_tokens)
    return math.exp(mean) if mean < 700 else math.inf
