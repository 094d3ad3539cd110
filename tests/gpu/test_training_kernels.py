"""Do the GPU's paths of training compute what their plain references compute, and how much faster are they?

1. Each kernel on activations of a real model's size, against its formula in plain torch.
2. The gates' gradients of two small models, dense and mixture, on the GPU against the CPU, which has the plain forms.
3. A block of a 7B model with fused norms, rotary embeddings and activations against eager mode.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ddp_prune.core import experts
from ddp_prune.core.decoder import fuse_elementwise
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.kernels import distill_chunk, expert_gates_backward, gate_backward, scale_experts
from ddp_prune.core.loss import OutputHead, distill, final_hidden
from ddp_vllm.dimensions import choose_head_unit, dimensions_of, widths_of
from lease import DEVICE, DRY, error_of, seconds_of
from machine import build, config_of

ROUNDING = 1e-2  # of bfloat16 results, share of the norm
TOKENS = 20 if DRY else 8192
Values = tuple[torch.Tensor, ...]


def compare(kernel: Callable[[], Values], plain: Callable[[], Values], moved: int) -> None:
    """Compare the results, and print the times and the rate of the bytes that must be moved."""
    errors = [error_of(value, expected) for value, expected in zip(kernel(), plain(), strict=True)]
    assert max(errors) < ROUNDING, errors
    seconds, plain_seconds = seconds_of(kernel), seconds_of(plain)
    print(f"{1e6 * seconds:.0f} us, {plain_seconds / seconds:.1f} times as fast, {moved / seconds / 1e9:.0f} GB/s")


@pytest.mark.parametrize(("units", "columns"), [(24, 1), (3, 16)] if DRY else [(11008, 1), (32, 128), (8, 512)])
def test_gates(units: int, columns: int) -> None:
    gradient, x = (torch.randn(TOKENS, units * columns, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    mask = torch.rand(units, device=DEVICE)

    def plain() -> Values:
        products = (gradient * x).float().unflatten(-1, (-1, columns)).sum(-1)
        spread = mask.to(x.dtype).repeat_interleave(columns)
        return gradient * spread, products.sum(0), products.square().sum(0)

    compare(lambda: gate_backward(gradient, x, mask, columns), plain, 3 * x.nbytes)


def test_expert_gates() -> None:
    slots, num_experts, channels = (20, 3, 40) if DRY else (65536, 128, 768)
    gradient, x = (torch.randn(slots, channels, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    mask = torch.rand(num_experts, channels, device=DEVICE)
    # the last one is idle
    expert = torch.randint(num_experts - 1, (slots,), device=DEVICE).sort().values
    sizes = torch.bincount(expert, minlength=num_experts)
    ends = sizes.cumsum(0, dtype=torch.int32)

    def sums(rows: torch.Tensor) -> torch.Tensor:
        return torch.segment_reduce(rows, "sum", lengths=sizes, axis=0, unsafe=True, initial=0.0)

    def plain() -> Values:
        products = gradient.float() * x
        return gradient * mask.to(x.dtype)[expert], sums(products), sums(products.square())

    forward = lambda: (scale_experts(x, mask, ends),)  # noqa: E731
    compare(forward, lambda: (x * mask.to(x.dtype)[expert],), 2 * x.nbytes)
    backward = lambda: expert_gates_backward(gradient, x, mask, ends)  # noqa: E731
    compare(backward, plain, 3 * x.nbytes)


@pytest.mark.parametrize("vocabulary", [300] if DRY else [49152, 151936])
@pytest.mark.parametrize(("eta", "masked", "cap"), [(2.0, False, None), (0.0, True, None), (2.0, True, 30.0)])
def test_loss(vocabulary: int, eta: float, masked: bool, cap: float | None) -> None:
    """By autograd of torch's own cross-entropy and KL divergence."""
    tokens = 3 if DRY else 436
    student, teacher = (3 * torch.randn(tokens, vocabulary, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    labels = torch.randint(vocabulary, (tokens,), device=DEVICE)
    mask = torch.rand(tokens, device=DEVICE) if masked else None

    def kernel() -> Values:
        products = student.clone()  # the kernel overwrites them by the gradient
        losses = distill_chunk(products, teacher if eta else None, labels, mask, eta, 1.0, caps=(cap, cap))
        return losses if eta else losses[:1], products

    def plain() -> Values:
        leaf = student.float().requires_grad_()
        logits, reference = ((cap * (x / cap).tanh() if cap else x) for x in (leaf, teacher.float()))
        losses = F.cross_entropy(logits, labels, reduction="none")
        losses = (losses if mask is None else losses * mask).sum()[None]
        if eta:
            logp, log_teacher = logits.log_softmax(-1), reference.log_softmax(-1)
            losses = torch.stack([losses[0], F.kl_div(logp, log_teacher, reduction="sum", log_target=True)])
        (losses[0] + eta * losses[-1] * bool(eta)).backward()
        return losses.detach(), leaf.grad

    # the copy reads and writes too
    compare(kernel, plain, (7 if eta else 5) * student.nbytes)


def gate_gradients(config: dict[str, Any], device: str) -> Values:
    """Return loss, gradients and squares of all gates of a small model in float32; the weights do
    not depend on it."""
    torch.manual_seed(0)
    model, full = build(config, "cpu", torch.float32)
    model, sizes = model.to(device), dimensions_of(full)
    gated = GatedModel(model, widths_of(full), sizes, choose_head_unit("auto", sizes))
    tokens = torch.randint(3, config["vocab_size"], (2, 48)).to(device)
    masks = {kind: torch.rand(shape).add_(0.2).to(device).requires_grad_() for kind, shape in gated.shapes.items()}
    squares = {kind: torch.zeros_like(mask.detach()) for kind, mask in masks.items()}
    with torch.no_grad():
        teacher = final_hidden(model, tokens)
    with gated.masks(masks, squares):
        loss, _ = distill(final_hidden(model, tokens), teacher, OutputHead.of(model), tokens[:, 1:].reshape(-1), 2.0)
        loss.backward()
    pairs = [value for kind, mask in masks.items() for value in (mask.grad, squares[kind])]
    return tuple(value.detach().cpu() for value in (loss, *pairs))


@pytest.mark.parametrize("name", ["llama-2-7b", "qwen3-30b-a3b"])
def test_gate_gradients_of_a_small_model(name: str) -> None:
    config = config_of(name, is_tiny=True) | {"num_key_value_heads": 4}
    on_cpu, on_gpu = gate_gradients(config, "cpu"), gate_gradients(config, DEVICE)
    assert max(error_of(value, expected) for value, expected in zip(on_gpu, on_cpu, strict=True)) < 1e-3
    print("grouped:", experts.can_group(torch.empty(1, 8, 8, device=DEVICE, dtype=torch.bfloat16)))


def test_fusion() -> None:
    """Forward and backward of two layers; the rotary function stays compiled, so this is the last test."""
    config = config_of("llama-2-7b") | {"num_hidden_layers": 2, "num_key_value_heads": 8}
    model, _ = build(config, DEVICE, torch.bfloat16)
    tokens = torch.randint(3, config["vocab_size"], (2, 32) if DRY else (4, 2048), device=DEVICE)
    # the norm of what the last norm returns is constant, so a loss of it alone would have no gradient
    direction = torch.randn(config["hidden_size"], device=DEVICE)

    def run() -> Values:
        hidden = model.get_input_embeddings()(tokens).detach().requires_grad_()
        output = model.get_decoder()(inputs_embeds=hidden, use_cache=False).last_hidden_state
        (output.float() @ direction).mean().backward()
        return output.detach(), hidden.grad

    expected, plain_seconds = run(), seconds_of(run)
    parts = fuse_elementwise(model, "eager" if DRY else "inductor")
    assert max(error_of(value, other) for value, other in zip(run(), expected, strict=True)) < 2 * ROUNDING
    print(f"{parts} parts, {plain_seconds / seconds_of(run):.2f} times as fast as eager mode")
