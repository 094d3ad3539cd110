"""Gradients of gates, of experts, and of the chunked head, compared with plain PyTorch; fused and narrow forms too."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import seams
import torch
import torch.nn.functional as F
from commands import cases
from family_cases import CASES
from seams import ROTARY, OutputHead, distill, fuse_elementwise, gated, grouped, looped, open_source
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.activations import ClippedGELUActivation
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextMLP
from transformers.models.llama.modeling_llama import LlamaMLP

TOKENS = seams.BLOCKS[:2]


@pytest.mark.parametrize("columns", [1, 3])
def test_scaling_sums_each_token_and_squares_it(columns: int) -> None:
    """Against autograd, with a mask of its own for every token."""
    generator = torch.Generator().manual_seed(0)
    x, slope = torch.randn(2, 2, 5, 4 * columns, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, generator=generator, dtype=torch.float64)
    each = mask.expand(2, 5, 4).clone().requires_grad_()
    (x * each.repeat_interleave(columns, -1) * slope).sum().backward()
    leaf, inputs, squares = mask.clone().requires_grad_(), x.clone().requires_grad_(), torch.zeros(4).double()
    (seams._Scale.apply(inputs, leaf, columns, squares, None) * slope).sum().backward()
    assert each.grad is not None and leaf.grad is not None
    torch.testing.assert_close(leaf.grad, each.grad.sum((0, 1)))
    torch.testing.assert_close(squares, each.grad.square().sum((0, 1)))
    torch.testing.assert_close(inputs.grad, slope * mask.repeat_interleave(columns))


IDS = torch.tensor([[0, 2], [2, 5], [6, 0]] * 2)  # experts 1, 3, 4 and 7 are idle


def test_gradients_of_experts_are_slopes_and_their_squares_those_of_each_token(dense: Callable[[str], Path]) -> None:
    """Of one layer, for masks and hidden states. Tokens one by one give the parts that are squared and summed."""
    mixtral = gated(open_source(str(dense("mixtral"))))
    experts = mixtral.model.get_submodule("model.layers.1.mlp.experts").double()
    generator = torch.Generator().manual_seed(2)
    x, wanted = torch.randn(2, 6, 48, generator=generator, dtype=torch.float64)
    shares = torch.rand(6, 2, generator=generator, dtype=torch.float64)
    gates = torch.rand(mixtral.shapes["experts"], generator=generator, dtype=torch.float64)

    def gradient(tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        leaf, squares = gates.clone().requires_grad_(), torch.zeros_like(gates)
        with mixtral.masks({"experts": leaf}, {"experts": squares}):
            (experts(x[tokens], IDS[tokens], shares[tokens]) * wanted[tokens]).sum().backward()
        assert leaf.grad is not None
        return leaf.grad, squares

    parts = [gradient(slice(token, token + 1))[0] for token in range(6)]
    whole, squares = gradient(slice(None))
    torch.testing.assert_close(whole, torch.stack(parts).sum(0))
    torch.testing.assert_close(squares, torch.stack(parts).square().sum(0))
    assert squares[1, 2].min() > 0 and squares[1, 1].max() == 0  # a busy expert and an idle one
    assert all(parameter.grad is None for parameter in mixtral.model.parameters())

    def run(x: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        with mixtral.masks({"experts": masks}):
            return experts(x, IDS, shares)

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), gates.requires_grad_()), fast_mode=True)


@pytest.mark.parametrize("sizes", [(5, 0, 7, 1), (0, 0, 13, 0), (0, 4, 0, 0)], ids=str)
def test_grouped_and_looped_agree(sizes: tuple[int, ...]) -> None:
    """Idle experts first, last and between; all slots at one expert."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(sum(sizes), 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(4, 24, 16, generator=generator).bfloat16()
    ends = torch.tensor(sizes).cumsum(0).int()
    results = [function(x, weight, ends) for function in (grouped, looped)]
    gradients = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in results]
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_kernel_that_leaves_gradients_of_idle_experts_uninitialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's kernel does on Blackwell; no such device runs here."""
    sizes = torch.tensor((0, 5, 0, 3))
    ends, x, weight = sizes.cumsum(0).int(), torch.randn(8, 16), torch.randn(4, 24, 16, requires_grad=True)

    def kernel(x: torch.Tensor, weight_EIO: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        filled = weight_EIO.clone()
        filled.register_hook(lambda gradient: gradient.where((sizes > 0)[:, None, None], torch.nan))
        return looped(x, filled.transpose(-2, -1), offs)

    monkeypatch.setattr(seams.experts_module.F, "grouped_mm", kernel)
    results = [function(x, weight, ends).square().sum() for function in (grouped, looped)]
    assert torch.equal(*(torch.autograd.grad(result, weight)[0] for result in results))


HEADS: dict[str, dict[str, float]] = {"plain": {}, "granite": {"divisor": 4.0}, "gemma": {"cap": 2.5}}
HEADS["both"] = {"divisor": 0.5, "cap": 1.5}


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 53, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(40, 12, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), teacher, weight, torch.randint(0, 40, (53,), generator=generator)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("eta", [0.0, 2.0])
def test_loss_and_gradient_are_pytorchs(eta: float, head: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights of the labels too, and then with a teacher that has a head of its own."""
    monkeypatch.setattr(seams.loss_module, "CHUNK_BYTES", 4 * 40 * 17)  # 53 tokens: three full chunks and a short one
    student, teacher, weight, labels = inputs()
    weights = torch.linspace(-1, 3, 53).clamp_min(0) if weighted else None
    teacher_weight = weight.roll(1, 0) if weighted else weight
    heads = [OutputHead(weight=each, **HEADS[head]) for each in (weight, teacher_weight)]
    loss, metrics = distill(student, teacher, heads[0], labels, eta, heads[1], weights)
    cross_entropy, divergence = metrics.tolist()
    (3.0 * loss).backward()
    gradient, student.grad = student.grad, None
    divisor, cap = HEADS[head].get("divisor", 1.0), HEADS[head].get("cap")

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scores = hidden @ weight.t() / divisor
        return F.log_softmax(scores if cap is None else cap * torch.tanh(scores / cap), -1)

    log_p, log_t = plain(student, weight), plain(teacher, teacher_weight)
    plain_ce = (F.nll_loss(log_p, labels, reduction="none") * (1.0 if weights is None else weights)).mean()
    plain_kl = F.kl_div(log_p, log_t, log_target=True, reduction="batchmean")
    (3.0 * (plain_ce + eta * plain_kl)).backward()
    assert cross_entropy == pytest.approx(plain_ce.item(), rel=1e-5)
    assert divergence == pytest.approx(plain_kl.item() if eta else 0.0, rel=1e-5)
    torch.testing.assert_close(gradient, student.grad, rtol=1e-4, atol=1e-6)  # the head works in float32


def test_peaked_distributions_lose_no_digits() -> None:
    """Logits of hundreds, most probabilities 0 in float32; labels that the student is sure of, and others."""
    student, teacher, weight, labels = inputs()
    exact_p, exact_t = (F.log_softmax(300 * (hidden @ weight.t()), -1) for hidden in (student.detach(), teacher))
    labels[::2] = exact_p.argmax(-1)[::2]
    single = [tensor.detach().float() for tensor in (student, teacher, 300 * weight)]
    cross_entropy, divergence = distill(*single[:2], OutputHead(weight=single[2]), labels, 2.0)[1].tolist()
    exact = F.kl_div(exact_p, exact_t, log_target=True, reduction="batchmean").item()
    assert cross_entropy == pytest.approx(F.nll_loss(exact_p, labels).item(), rel=1e-4)
    assert divergence == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("family", ["granite", "gemma2", "gemma3_text", "llama"])
def test_the_head_makes_the_logits_of_the_stock_model(family: str) -> None:
    model: Any = AutoModelForCausalLM.from_config(CASES[family]).eval()
    tokens = torch.randint(1, 96, (1, 9))
    with torch.no_grad():
        hidden = model.get_decoder()(tokens).last_hidden_state[0]
        torch.testing.assert_close(OutputHead.of(model).logits(hidden), model(tokens).logits[0])


@pytest.mark.filterwarnings("default")  # of torch's compiler
@pytest.mark.parametrize("backend", cases(["eager", "aot_eager", "inductor"], ["eager"]))
def test_fused_parts_compute_the_same(backend: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, results = open_source(str(tiny_model)), []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for is_fused in (False, True):
        model = gated(source, "kv-group")
        if is_fused:
            modeling = sys.modules[type(model.model).__module__]
            monkeypatch.setattr(modeling, ROTARY, getattr(modeling, ROTARY))  # restored after the test
            # two norms and an MLP a layer, the last norm, RoPE
            assert fuse_elementwise(model.model, backend) == 3 * source.sizes.num_layers + 1 + 1
        leaves = {kind: torch.full(shape, 0.9).requires_grad_() for kind, shape in model.shapes.items()}
        squares = {kind: torch.zeros(shape) for kind, shape in model.shapes.items()}
        with model.masks(leaves, squares):
            states = seams.final_hidden(model.model, TOKENS)
            states.square().mean().backward()
        results.append((states.detach(), {kind: leaf.grad for kind, leaf in leaves.items()}, squares))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 8, "layers are compiled one by one"
    eager, fused = results
    torch.testing.assert_close(fused[0], eager[0], atol=1e-5, rtol=1e-4)
    for kind in eager[1]:
        torch.testing.assert_close(fused[1][kind], eager[1][kind], atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(fused[2][kind], eager[2][kind], atol=1e-6, rtol=1e-2)


def config(**settings: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "mlp_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    return SimpleNamespace(**sizes | settings)


def clipped(*bounds: float) -> nn.Module:
    """Return MLPs whose activations are of one class, with other bounds."""
    mlps = [LlamaMLP(config()) for _ in bounds]
    for mlp, bound in zip(mlps, bounds, strict=True):
        mlp.act_fn = ClippedGELUActivation(-bound, bound)
    return nn.Sequential(*mlps)


SPARSE = {"intermediate_size": [64], "activation_sparsity_pattern": [0.95], "hidden_activation": "silu"}
MLPS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # how to make it -> how many of its forwards are replaced
    "plain": (lambda: LlamaMLP(config()), 1),
    "activations of one class": (lambda: clipped(10.0, 1000.0), 2),
    "multipliers": (lambda: FalconH1MLP(config(mlp_multipliers=[0.5, 2.0])), 0),
    "a clamp before the activation": (lambda: Glm5NextTextMLP(config(swiglu_limit=1000.0)), 0),
    "the largest of all channels": (lambda: Gemma3nTextMLP(config(**SPARSE)), 0),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MLPS)
def test_an_mlp_is_replaced_only_by_what_it_computes(name: str) -> None:
    """Whatever its projections are called. The inputs reach every clamp."""
    torch.manual_seed(0)
    make, number = MLPS[name]
    mlp = make()
    x = torch.randn(32, 64) * torch.logspace(-2, 4, 32)[:, None]
    expected = mlp(x)
    assert fuse_elementwise(mlp, "eager") == number
    torch.testing.assert_close(mlp(x), expected, atol=0, rtol=1e-6)
