"""Triton kernels of training: the backward of gates in one pass over activations and gradients, and
the loss of a chunk in one over its logits.

The plain forms are the references. `gates._Scale` and `experts._ScaleExperts` move about 40 bytes an
element, where 6 are needed; `loss.py` makes about fifteen float32 passes over [N, V], where two over
the 16-bit products of both heads are enough, and the gradient is written over the student's. Sums are
deterministic: every program writes a partial sum of its own. An H100 took 0.1 to 0.5 of the time of
the plain forms (docs/measured.md).
Legend: T tokens or S slots, sorted by expert; U units of some columns each; E experts, C channels;
N tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, WIDTH = 16, 128  # of a tile: tokens, and channels
STEPS = 16  # tiles of a program, one below the other
SPLITS = 8  # programs that share the slots of an expert


@triton.jit  # type: ignore[untyped-decorator]
def gate_backward_kernel(  # type: ignore[no-untyped-def]
    gradient_ptr, x_ptr, mask_ptr, out_ptr, sums_ptr, squares_ptr, num_tokens, width, num_units,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write gradient · mask, and of g·x per token and unit the sum and the sum of squares over the
    block's tokens."""
    block, tile = tl.program_id(0), tl.program_id(1)
    if COLUMNS == 1:  # a program has WIDTH units
        columns = tile * WIDTH + tl.arange(0, WIDTH)
        inside = columns < width
        mask = tl.load(mask_ptr + columns, inside, 0.0)
        sums = tl.zeros([WIDTH], tl.float32)
        squares = tl.zeros([WIDTH], tl.float32)
    else:  # one unit
        columns = tile * COLUMNS + tl.arange(0, WIDTH)
        inside = tl.arange(0, WIDTH) < COLUMNS
        mask = tl.load(mask_ptr + tile) + tl.zeros([WIDTH], tl.float32)
        sums = 0.0
        squares = 0.0
    mask = mask.to(x_ptr.dtype.element_ty).to(tl.float32)  # rounded as in forward
    for step in range(STEPS):
        rows = ((block * STEPS + step) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        places = rows[:, None] * width + columns[None, :]
        here = (rows < num_tokens)[:, None] & inside[None, :]
        gradient = tl.load(gradient_ptr + places, here, 0.0).to(tl.float32)
        products = gradient * tl.load(x_ptr + places, here, 0.0).to(tl.float32)
        tl.store(out_ptr + places, (gradient * mask[None, :]).to(out_ptr.dtype.element_ty), here)
        if COLUMNS == 1:
            sums += tl.sum(products, 0)
            squares += tl.sum(products * products, 0)
        else:
            of_unit = tl.sum(products, 1)
            sums += tl.sum(of_unit)
            squares += tl.sum(of_unit * of_unit)
    if COLUMNS == 1:
        tl.store(sums_ptr + block * num_units + columns, sums, inside)
        tl.store(squares_ptr + block * num_units + columns, squares, inside)
    else:
        tl.store(sums_ptr + block * num_units + tile, sums)
        tl.store(squares_ptr + block * num_units + tile, squares)


def gate_backward(gradient: Tensor, x: Tensor, mask_U: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x, that of the mask [U], and the sum over tokens of its squared
    per-token gradients [U].

    gradient, x: [..., U·columns], of one dtype. mask_U: float32.
    """
    gradient, x = gradient.contiguous(), x.contiguous()
    width, num_units = x.shape[-1], len(mask_U)
    assert width == num_units * columns and x.shape == gradient.shape and mask_U.dtype == torch.float32
    num_tokens = x.numel() // width
    out, blocks = torch.empty_like(x), triton.cdiv(num_tokens, ROWS * STEPS)
    sums_BU, squares_BU = torch.empty(2, blocks, num_units, device=x.device).unbind()
    width_of_tile = WIDTH if columns == 1 else triton.next_power_of_2(columns)
    tiles = triton.cdiv(width, WIDTH) if columns == 1 else num_units
    gate_backward_kernel[(blocks, tiles)](
        gradient, x, mask_U.contiguous(), out, sums_BU, squares_BU, num_tokens, width, num_units,
        COLUMNS=columns, WIDTH=width_of_tile, ROWS=max(1, ROWS * WIDTH // max(WIDTH, width_of_tile)),
        STEPS=STEPS * max(WIDTH, width_of_tile) // WIDTH,
    )  # fmt: skip
    return out, sums_BU.sum(0), squares_BU.sum(0)


@triton.jit  # type: ignore[untyped-decorator]
def expert_gates_kernel(  # type: ignore[no-untyped-def]
    gradient_ptr, x_ptr, mask_ptr, ends_ptr, out_ptr, sums_ptr, squares_ptr, width, num_experts,
    BACKWARD: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Multiply the slots of an expert by its gates; in backward, also sum g·x and its square over a
    part of them."""
    expert, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tile * WIDTH + tl.arange(0, WIDTH)
    inside = columns < width
    mask = tl.load(mask_ptr + expert.to(tl.int64) * width + columns, inside, 0.0)
    mask = mask.to(x_ptr.dtype.element_ty).to(tl.float32)
    stop = tl.load(ends_ptr + expert)
    start = tl.load(ends_ptr + expert - 1, expert > 0, 0)
    share = tl.cdiv(tl.cdiv(stop - start, SPLITS), ROWS) * ROWS
    first = start + split * share
    last = tl.minimum(first + share, stop)
    sums = tl.zeros([WIDTH], tl.float32)
    squares = tl.zeros([WIDTH], tl.float32)
    for row in range(first, last, ROWS):
        rows = (row + tl.arange(0, ROWS)).to(tl.int64)
        places = rows[:, None] * width + columns[None, :]
        here = (rows < last)[:, None] & inside[None, :]
        gradient = tl.load(gradient_ptr + places, here, 0.0).to(tl.float32)
        tl.store(out_ptr + places, (gradient * mask[None, :]).to(out_ptr.dtype.element_ty), here)
        if BACKWARD:
            products = gradient * tl.load(x_ptr + places, here, 0.0).to(tl.float32)
            sums += tl.sum(products, 0)
            squares += tl.sum(products * products, 0)
    if BACKWARD:
        place = (split.to(tl.int64) * num_experts + expert) * width
        tl.store(sums_ptr + place + columns, sums, inside)
        tl.store(squares_ptr + place + columns, squares, inside)


def scale_experts(x_SC: Tensor, mask_EC: Tensor, ends_E: Tensor) -> Tensor:
    """Return each slot times the gates of its expert. The slots of expert e end before ends_E[e];
    float32 masks."""
    return _launch(x_SC, x_SC, mask_EC, ends_E, None, None)


def expert_gates_backward(
    gradient_SC: Tensor, x_SC: Tensor, mask_EC: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x, that of the mask [E, C], and the sum over slots of its squares [E,
    C]."""
    sums_PEC, squares_PEC = torch.empty(2, SPLITS, *mask_EC.shape, device=x_SC.device).unbind()
    out_SC = _launch(gradient_SC, x_SC, mask_EC, ends_E, sums_PEC, squares_PEC)
    return out_SC, sums_PEC.sum(0), squares_PEC.sum(0)


def _launch(
    gradient_SC: Tensor, x_SC: Tensor, mask_EC: Tensor, ends_E: Tensor,
    sums_PEC: Tensor | None, squares_PEC: Tensor | None,
) -> Tensor:  # fmt: skip
    gradient_SC, x_SC, mask_EC = gradient_SC.contiguous(), x_SC.contiguous(), mask_EC.contiguous()
    num_experts, width = mask_EC.shape
    assert x_SC.shape[1] == width and mask_EC.dtype == torch.float32
    out_SC = torch.empty_like(x_SC)
    grid = num_experts, triton.cdiv(width, WIDTH), SPLITS
    expert_gates_kernel[grid](
        gradient_SC, x_SC, mask_EC, ends_E, out_SC, out_SC if sums_PEC is None else sums_PEC,
        out_SC if squares_PEC is None else squares_PEC, width, num_experts,
        BACKWARD=sums_PEC is not None, SPLITS=SPLITS, ROWS=ROWS, WIDTH=WIDTH,
    )  # fmt: skip
    return out_SC


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
    student_NV: Tensor, teacher_NV: Tensor | None, labels_N: Tensor,
    loss_mask_N: Tensor | None, eta: float, scale: float, *,
    divisors: tuple[float, float] = (1.0, 1.0), caps: tuple[float | None, float | None] = (None, None),
) -> Tensor:  # fmt: skip
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
