"""Do the GPU's paths of training compute what their plain references compute, and how much faster
are they?

    python training_kernels.py OUT.json

1. Each kernel on activations of a real model's size, against its formula in plain torch.
2. The gates' gradients of two small models, dense and mixture, on the GPU against the CPU, which
    has the plain forms.
3. A block of a 7B model with fused norms, rotary embeddings and activations against eager mode.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from lease import DEVICE, DRY, Results, error_of, seconds_of

if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import torch.nn.functional as F

from ddp_prune.core import experts
from ddp_prune.core.fusion import fuse_elementwise
from ddp_prune.core.gate_kernels import expert_gates_backward, gate_backward, scale_experts
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.loss import OutputHead, distill, final_hidden
from ddp_prune.core.loss_kernel import distill_chunk
from ddp_vllm.families import choose_head_unit, dimensions_of, family_of
from models import CONFIGS, TINY

ROUNDING = 1e-2  # of bfloat16 results, share of the norm
Values = tuple[torch.Tensor, ...]


def compare(results: Results, name: str, kernel: Callable[[], Values], plain: Callable[[], Values], moved: int) -> None:
    """Add a row: errors of the kernel's results, times of both, and the rate of the bytes that must
    be moved."""
    with results.row(case=name) as row:
        row["errors"] = [error_of(value, expected) for value, expected in zip(kernel(), plain(), strict=True)]
        row["right"] = max(row["errors"]) < ROUNDING
        seconds, plain_seconds = seconds_of(kernel), seconds_of(plain)
        row |= {"us": 1e6 * seconds, "plain_us": 1e6 * plain_seconds, "faster": plain_seconds / seconds}
        row["gb_per_s"] = moved / seconds / 1e9


def check_gates(results: Results, tokens: int, units: int, columns: int) -> None:
    gradient, x = (torch.randn(tokens, units * columns, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    mask = torch.rand(units, device=DEVICE)

    def plain() -> Values:
        products = (gradient * x).float().unflatten(-1, (-1, columns)).sum(-1)
        spread = mask.to(x.dtype).repeat_interleave(columns)
        return gradient * spread, products.sum(0), products.square().sum(0)

    name = f"gate_backward, {tokens} tokens, {units} units of {columns}"
    compare(results, name, lambda: gate_backward(gradient, x, mask, columns), plain, 3 * x.nbytes)


def check_expert_gates(results: Results, slots: int, num_experts: int, channels: int) -> None:
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

    name = f"{slots} slots, {num_experts} experts of {channels}"
    forward = lambda: (scale_experts(x, mask, ends),)  # noqa: E731
    compare(results, f"scale_experts, {name}", forward, lambda: (x * mask.to(x.dtype)[expert],), 2 * x.nbytes)
    backward = lambda: expert_gates_backward(gradient, x, mask, ends)  # noqa: E731
    compare(results, f"expert_gates_backward, {name}", backward, plain, 3 * x.nbytes)


def check_loss(results: Results, tokens: int, vocabulary: int, eta: float, masked: bool, cap: float | None) -> None:
    """Compare with autograd of torch's own cross-entropy and KL divergence."""
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

    name = f"distill_chunk, {tokens} x {vocabulary}, eta {eta:g}{', loss mask' * masked}{f', cap {cap}' if cap else ''}"
    # the copy reads and writes too
    compare(results, name, kernel, plain, (7 if eta else 5) * student.nbytes)


def build(config: dict[str, Any], device: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return a random model and the config that the product reads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = config["model_type"]
    settings = AutoConfig.for_model(kind, **{name: value for name, value in config.items() if name != "model_type"})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    return model.requires_grad_(False).eval(), settings.to_dict() | config


def gate_gradients(config: dict[str, Any], device: str) -> Values:
    """Return loss, gradients and squares of all gates of a small model in float32; the weights do
    not depend on it."""
    torch.manual_seed(0)
    model, full = build(config, "cpu", torch.float32)
    model, sizes = model.to(device), dimensions_of(full)
    gated = GatedModel(model, family_of(full), sizes, choose_head_unit("auto", sizes))
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


def check_model(results: Results, name: str) -> None:
    config = CONFIGS[name] | {key: value for key, value in TINY.items() if key in CONFIGS[name]}
    with results.row(case=f"gate gradients of a small {name}, GPU against CPU") as row:
        on_cpu, on_gpu = gate_gradients(config, "cpu"), gate_gradients(config, DEVICE)
        row["errors"] = [error_of(value, expected) for value, expected in zip(on_gpu, on_cpu, strict=True)]
        row["right"] = max(row["errors"]) < 1e-3
        row["grouped"] = experts.can_group(torch.empty(1, 8, 8, device=DEVICE, dtype=torch.bfloat16))


def check_fusion(results: Results) -> None:
    """Forward and backward of two layers; the rotary function stays compiled, so this is the last
    check."""
    config = CONFIGS["llama-2-7b"] | (TINY if DRY else {}) | {"num_hidden_layers": 2, "num_key_value_heads": 8}
    model, _ = build({k: v for k, v in config.items() if "expert" not in k and "moe" not in k}, DEVICE, torch.bfloat16)
    tokens = torch.randint(3, config["vocab_size"], (2, 32) if DRY else (4, 2048), device=DEVICE)

    def run() -> Values:
        hidden = model.get_input_embeddings()(tokens).detach().requires_grad_()
        output = model.get_decoder()(inputs_embeds=hidden, use_cache=False).last_hidden_state
        output.float().square().mean().backward()
        return output.detach(), hidden.grad

    with results.row(case="norms, rotary embeddings and activations, fused against eager") as row:
        expected, plain_seconds = run(), seconds_of(run)
        row["parts"] = fuse_elementwise(model, "eager" if DRY else "inductor")
        row["errors"] = [error_of(value, other) for value, other in zip(run(), expected, strict=True)]
        row["right"] = max(row["errors"]) < 2 * ROUNDING
        seconds = seconds_of(run)
        row |= {"us": 1e6 * seconds, "plain_us": 1e6 * plain_seconds, "faster": plain_seconds / seconds}


def main() -> None:
    results = Results(sys.argv[1])
    torch.manual_seed(0)
    tokens = 20 if DRY else 8192
    for units, columns in ((24, 1), (3, 16)) if DRY else ((11008, 1), (32, 128), (8, 512)):
        check_gates(results, tokens, units, columns)
    check_expert_gates(results, *((20, 3, 40) if DRY else (65536, 128, 768)))
    for vocabulary in (300,) if DRY else (49152, 151936):
        for eta, masked, cap in ((2.0, False, None), (0.0, True, None), (2.0, True, 30.0)):
            check_loss(results, 3 if DRY else 436, vocabulary, eta, masked, cap)
    for name in ("llama-2-7b", "qwen3-30b-a3b"):
        check_model(results, name)
    check_fusion(results)
    results.finish()


if __name__ == "__main__":
    main()
