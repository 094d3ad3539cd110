"""One pass over the logits of a chunk on a GPU: cross-entropy, KL divergence and their gradient.

The plain form in `loss.py` is the reference: about fifteen float32 passes over [N, V]. This kernel
reads the 16-bit products of both heads twice and writes the gradient over the student's. It was
compiled and run in Triton's interpreter; no GPU has run it.
Legend: N tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096  # of the vocabulary, per step of a program


@triton.jit  # type: ignore[untyped-decorator]
def _logits(product, divisor, cap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return float32 logits: the product over the divisor, through c·tanh(·/c)."""
    x = product.to(tl.float32) / divisor
    if CAPPED:
        x = cap * (2.0 / (1.0 + tl.exp(-2.0 * x / cap)) - 1.0)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def distill_kernel(  # type: ignore[no-untyped-def]
    student_ptr, teacher_ptr, labels_ptr, mask_ptr, losses_ptr, vocabulary, eta, scale,
    divisor, cap, teacher_divisor, teacher_cap,
    DISTILLED: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a token's [w·CE, KL] and the gradient of scale·(w·CE + η·KL) over its products [V].

    The gradient of the logits is scale·((w + η)·p_student − η·p_teacher − w·onehot).
    """
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * vocabulary
    teacher_ptr += row * vocabulary
    weight = 1.0
    if MASKED:
        weight = tl.load(mask_ptr + row)
    label = tl.load(labels_ptr + row)
    top, total = float("-inf"), 0.0  # of the student: maximum, Σ exp(x − maximum)
    # crossed: Σ exp(x_t − maximum)·(x_t − x)
    teacher_top, teacher_total, crossed = float("-inf"), 0.0, 0.0
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = _logits(tl.load(student_ptr + columns, inside, 0.0), divisor, cap, CAPPED)
        within = tl.where(inside, x, float("-inf"))
        above = tl.maximum(top, tl.max(within))
        total = total * tl.exp(top - above) + tl.sum(tl.exp(within - above))
        top = above
        if DISTILLED:
            y = _logits(tl.load(teacher_ptr + columns, inside, 0.0), teacher_divisor, teacher_cap, CAPPED)
            within = tl.where(inside, y, float("-inf"))
            above = tl.maximum(teacher_top, tl.max(within))
            faded, mass = tl.exp(teacher_top - above), tl.exp(within - above)
            teacher_total = teacher_total * faded + tl.sum(mass)
            crossed = crossed * faded + tl.sum(mass * (y - x))
            teacher_top = above
    log_z = top + tl.log(total)
    log_z_teacher = 0.0
    chosen = _logits(tl.load(student_ptr + label), divisor, cap, CAPPED)
    tl.store(losses_ptr + 2 * row, weight * (log_z - chosen))
    divergence = 0.0
    if DISTILLED:
        log_z_teacher = teacher_top + tl.log(teacher_total)
        divergence = crossed / teacher_total + log_z - log_z_teacher
    tl.store(losses_ptr + 2 * row + 1, divergence)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = _logits(tl.load(student_ptr + columns, inside, 0.0), divisor, cap, CAPPED)
        gradient = tl.exp(x - log_z)
        if DISTILLED:
            y = _logits(tl.load(teacher_ptr + columns, inside, 0.0), teacher_divisor, teacher_cap, CAPPED)
            gradient = (weight + eta) * gradient - eta * tl.exp(y - log_z_teacher)
        else:
            gradient = weight * gradient
        gradient = scale * (gradient - tl.where(columns == label, weight, 0.0))
        if CAPPED:  # the slope of the cap is 1 − (logit / c)²
            gradient *= 1.0 - (x / cap) * (x / cap)
        tl.store(student_ptr + columns, gradient.to(student_ptr.dtype.element_ty), inside)


def distill_chunk(
    student_NV: torch.Tensor, teacher_NV: torch.Tensor | None, labels_N: torch.Tensor,
    loss_mask_N: torch.Tensor | None, eta: float, scale: float, *,
    divisors: tuple[float, float] = (1.0, 1.0), caps: tuple[float | None, float | None] = (None, None),
) -> torch.Tensor:  # fmt: skip
    """Overwrite the student's products by their gradient, and return float32 [2]: the sums of w·CE
    and KL.

    student_NV, teacher_NV: W·h of both heads, contiguous, in 16 or 32 bits, before divisor and cap.
    labels_N: int64. loss_mask_N: w, float32; None: 1. divisors, caps: of student and teacher, as
    `OutputHead`; both have a cap or none.
    """
    assert student_NV.is_contiguous() and (teacher_NV is None or teacher_NV.is_contiguous())
    assert (caps[0] is None) == (teacher_NV is None or caps[1] is None) or teacher_NV is None
    losses_N2 = torch.empty(len(student_NV), 2, device=student_NV.device)
    distill_kernel[(len(student_NV),)](
        student_NV, student_NV if teacher_NV is None else teacher_NV, labels_N,
        losses_N2 if loss_mask_N is None else loss_mask_N, losses_N2, student_NV.shape[1], eta, scale,
        divisors[0], caps[0] or 1.0, divisors[1], caps[1] or 1.0,
        DISTILLED=teacher_NV is not None and eta > 0, MASKED=loss_mask_N is not None,
        CAPPED=caps[0] is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return losses_N2.sum(0)
