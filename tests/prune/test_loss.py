"""The chunked head against plain PyTorch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_cases import CASES
from transformers import AutoModelForCausalLM

from ddp_prune.core import loss as loss_module
from ddp_prune.core.loss import OutputHead, distill

HEADS: dict[str, dict[str, float]] = {"plain": {}, "granite": {"divisor": 4.0}, "gemma": {"cap": 2.5}}
HEADS["both"] = {"divisor": 0.5, "cap": 1.5}


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(53, 12, generator=generator, dtype=dtype) for _ in range(2))
    weight = torch.randn(40, 12, generator=generator, dtype=dtype)
    return student.requires_grad_(), teacher, weight, torch.randint(0, 40, (53,), generator=generator)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("eta", [0.0, 2.0])
def test_loss_and_gradient_equal_plain_pytorch(
    eta: float, head: str, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights of the labels too, and then with a teacher that has a head of its own."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 40 * 17)  # 53 tokens: three full chunks and a short one
    student, teacher, weight, labels = _inputs()
    weights = torch.linspace(-1, 3, 53).clamp_min(0) if weighted else None
    teacher_weight = weight.roll(1, 0) if weighted else weight
    heads = [OutputHead(weight=each, **HEADS[head]) for each in (weight, teacher_weight)]
    loss, metrics = distill(student, teacher, heads[0], labels, eta, heads[1], weights)
    cross_entropy, divergence = metrics.tolist()
    (3.0 * loss).backward()
    gradient, student.grad = student.grad, None
    divisor, cap = HEADS[head].get("divisor", 1.0), HEADS[head].get("cap")

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = hidden @ weight.t() / divisor
        return F.log_softmax(logits if cap is None else cap * torch.tanh(logits / cap), -1)

    log_p, log_t = plain(student, weight), plain(teacher, teacher_weight)
    plain_ce = (F.nll_loss(log_p, labels, reduction="none") * (1.0 if weights is None else weights)).mean()
    plain_kl = F.kl_div(log_p, log_t, log_target=True, reduction="batchmean")
    (3.0 * (plain_ce + eta * plain_kl)).backward()
    assert cross_entropy == pytest.approx(plain_ce.item(), rel=1e-5)
    assert divergence == pytest.approx(plain_kl.item() if eta else 0.0, rel=1e-5)
    torch.testing.assert_close(gradient, student.grad, rtol=1e-4, atol=1e-6)  # the head works in float32


@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_peaked_distributions_lose_no_digits(scale: float) -> None:
    """Logits of hundreds, most probabilities 0 in float32; labels that the student is sure of, and others."""
    student, teacher, weight, labels = _inputs()
    exact_p, exact_t = (F.log_softmax(scale * (hidden @ weight.t()), -1) for hidden in (student.detach(), teacher))
    labels[::2] = exact_p.argmax(-1)[::2]
    single = [tensor.detach().float() for tensor in (student, teacher, scale * weight)]
    metrics = distill(single[0], single[1], OutputHead(weight=single[2]), labels, 2.0)[1]
    cross_entropy, divergence = metrics.tolist()
    assert cross_entropy == pytest.approx(F.nll_loss(exact_p, labels).item(), rel=1e-4)
    assert divergence == pytest.approx(
        F.kl_div(exact_p, exact_t, log_target=True, reduction="batchmean").item(), rel=1e-4
    )


@pytest.mark.parametrize("family", ["granite", "gemma2", "gemma3_text", "llama"])
def test_the_head_makes_the_logits_of_the_stock_model(family: str) -> None:
    model: Any = AutoModelForCausalLM.from_config(CASES[family]).eval()
    tokens = torch.randint(1, 96, (1, 9))
    with torch.no_grad():
        hidden = model.get_decoder()(tokens).last_hidden_state[0]
        torch.testing.assert_close(OutputHead.of(model).logits(hidden), model(tokens).logits[0])
