"""Can a small mixture of experts with real language in it be made of a dense model, for want of a
pretrained one?

    python benchmarks/lab/upcycle.py OUT [--parent MODEL] [--data TEXT]

No pretrained mixture of experts can be had from a package registry; this makes one of SmolLM2-135M.
Of each MLP the channels of most energy become a shared expert that sees every token. The others are
dealt out to the routed experts, each to one, those that work for the same tokens together. A token
uses the experts whose channels have most of its energy: channels and tokens are dealt out in turn,
as in k-means, and the router starts as a linear regression of that energy, so some experts are
chosen far more often than others. Then MLPs and routers learn from the parent, by distillation, to
do without what each token no longer gets; on narrow text they forget the rest, so give several
domains. Attention, norms and embeddings are the parent's.

The result is a stock Qwen2-MoE, which has a shared expert and which transformers and vLLM know
without code of ours. It is something real to prune, serve and measure, but it knows no more than
its parent, was trained for minutes, and a token uses three experts of four: what pruning does to it
says little about models pretrained as mixtures. The last line on stdout is JSON.

Legend: T tokens, H hidden size, I channels of the parent's MLP, S shared ones, R others, E experts,
C channels of one.
"""

import copy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from ddp_prune.core.gates import GatedModel
from ddp_prune.core.loss import OutputHead, distill, final_hidden, perplexity_of
from ddp_prune.models.evaluation import losses_of
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import Source, open_source
from ddp_prune.text.blocks import load_blocks
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm.dimensions import choose_head_unit
from ddp_vllm.output import atomic_folder
from fetch import fetch_conversations, fetch_model
from scripts import result_line, script_parser

DEALT_BLOCKS, SEQ_LEN = 32, 256  # text that channels are dealt out by
ROUNDS = 10  # of dealing out channels and tokens in turn
RIDGE = 1e-2  # of the mean of the Gram matrix's diagonal
# standard deviation of the first router's logits over experts: chosen experts weigh about the same
LOGIT_SCALE = 0.1
DISTILLATION = 2.0  # η: weight of the divergence from the parent beside the cross-entropy
WARMUP = 20  # steps
COPIED = (  # fields of a Llama config that a Qwen2-MoE has too
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act",
    "tie_word_embeddings", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of the mixture, and how it learns."""

    num_experts: int = 20
    num_chosen: int = 15
    """Experts a token is sent to."""
    shared_size: int = 896
    """Channels of the shared expert; the parent's others are shared out evenly."""
    steps: int = 200
    batch_size: int = 2
    """Sequences of 256 tokens a step."""
    learning_rate: float = 5e-4
    seed: int = 0


class RoutedMLP(torch.nn.Module):
    """A gated MLP whose channels a token uses as far as its router says: a mixture in the shape of
    its parent.

    The first `shared_size` channels are used in full; then come those of expert 0, of expert 1, and
    so on, which count by the routing weights. These add up to `num_chosen`, so that an expert among
    equals counts in full.
    """

    def __init__(self, mlp: Any, order_I: torch.Tensor, router_EH: torch.Tensor, plan: Plan) -> None:
        super().__init__()
        self.mlp, self.plan = copy.deepcopy(mlp).float(), plan
        self.router = torch.nn.Linear(router_EH.shape[1], plan.num_experts, bias=False, device=router_EH.device)
        with torch.no_grad():
            self.router.weight.copy_(router_EH)
            for projection in (self.mlp.gate_proj, self.mlp.up_proj):
                projection.weight.copy_(projection.weight[order_I])
            self.mlp.down_proj.weight.copy_(self.mlp.down_proj.weight[:, order_I])

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Map [..., H] to [..., H]."""
        h_TI = self.mlp.act_fn(self.mlp.gate_proj(x_TH)) * self.mlp.up_proj(x_TH)
        shared_TS, routed_TR = h_TI.tensor_split([self.plan.shared_size], dim=-1)
        routed_TEC = routed_TR.unflatten(-1, (self.plan.num_experts, -1)) * self.weights(x_TH)[..., None].to(h_TI.dtype)
        return self.mlp.down_proj(torch.cat([shared_TS, routed_TEC.flatten(-2)], dim=-1))

    def weights(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return float32 [..., E], 0 where a token is not sent."""
        best = self.router(x_TH).float().softmax(-1).topk(self.plan.num_chosen, dim=-1)
        values = best.values / best.values.mean(-1, keepdim=True)
        return values.new_zeros(*x_TH.shape[:-1], self.plan.num_experts).scatter(-1, best.indices, values)


@torch.no_grad()
def split_mlp(mlp: Any, x_TH: torch.Tensor, plan: Plan) -> RoutedMLP:
    """Deal out the channels of one MLP by what it does with the inputs `x_TH`, [T, H]."""
    h_TI = (mlp.act_fn(mlp.gate_proj(x_TH)) * mlp.up_proj(x_TH)).float()
    energy_TI = h_TI.square() * mlp.down_proj.weight.float().square().sum(0)
    ranked_I = energy_TI.mean(0).argsort(descending=True, stable=True)
    shared_S, others_R = ranked_I.tensor_split([plan.shared_size])
    energy_TR = energy_TI[:, others_R]
    shares_TR = energy_TR / energy_TR.sum(1, keepdim=True).clamp_min(1e-30)
    dealt_EC = deal_channels(shares_TR, plan)
    kept_TE = shares_TR[:, dealt_EC].sum(-1)
    router_EH = ridge(x_TH.float(), kept_TE - kept_TE.mean(1, keepdim=True), RIDGE)
    router_EH *= LOGIT_SCALE / (x_TH.float() @ router_EH.T).std(1, correction=0).mean().clamp_min(1e-30)
    return RoutedMLP(mlp, torch.cat([shared_S, others_R[dealt_EC.flatten()]]), router_EH, plan)


def deal_channels(shares_TR: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return int64 [E, C], every position of R once; `shares_TR` says how much of a token's energy
    is in each channel.

    A token belongs to the experts that hold most of its energy. A channel belongs to the expert to
    whose tokens it gives most; where that is full, the greatest gift comes first.
    """
    num_channels = shares_TR.shape[1]
    size, rest = divmod(num_channels, plan.num_experts)
    if rest:
        raise ValueError(f"{num_channels} channels cannot be shared out evenly among {plan.num_experts} experts")
    generator = torch.Generator().manual_seed(plan.seed)
    dealt_EC = torch.randperm(num_channels, generator=generator).to(shares_TR.device).view(plan.num_experts, size)
    for _ in range(ROUNDS):
        kept_TE = shares_TR[:, dealt_EC].sum(-1)
        belongs_TE = torch.zeros_like(kept_TE).scatter(1, kept_TE.topk(plan.num_chosen, dim=1).indices, 1.0)
        gifts_RE = shares_TR.T @ belongs_TE
        hands: list[list[int]] = [[] for _ in range(plan.num_experts)]
        free = set(range(num_channels))
        for gift in gifts_RE.flatten().argsort(descending=True, stable=True).tolist():
            channel, expert = divmod(gift, plan.num_experts)
            if channel in free and len(hands[expert]) < size:
                free.remove(channel)
                hands[expert].append(channel)
        dealt_EC = torch.tensor(hands, device=shares_TR.device)
    return dealt_EC


def ridge(x_TA: torch.Tensor, y_TB: torch.Tensor, strength: float) -> torch.Tensor:
    """Return the [B, A] that maps x to y with least squares, drawn towards 0."""
    gram_AA = x_TA.T @ x_TA
    gram_AA.diagonal().add_(strength * gram_AA.diagonal().mean() + 1e-12)
    return torch.cholesky_solve(x_TA.T @ y_TB, torch.linalg.cholesky(gram_AA)).T


@torch.no_grad()
def split(parent: Any, blocks: torch.Tensor, plan: Plan) -> Any:
    """Return a copy of a Llama with a `RoutedMLP` in every layer; `blocks` is int64 [num_blocks,
    seq_len]."""
    model, hooks = copy.deepcopy(parent), []
    for source, target in zip(parent.model.layers, model.model.layers, strict=True):

        def split_here(mlp: Any, args: Any, _output: Any, target: Any = target) -> None:
            target.mlp = split_mlp(mlp, args[0].flatten(0, -2), plan)

        hooks.append(source.mlp.register_forward_hook(split_here))
    parent.get_decoder()(blocks, use_cache=False)
    for hook in hooks:
        hook.remove()
    return model.requires_grad_(False)


def train(model: Any, parent: Any, blocks: torch.Tensor, plan: Plan) -> None:
    """Teach MLPs and routers of a split model, in bf16 with float32 weights, what the parent does
    with `blocks`."""
    parameters = [parameter for layer in model.model.layers for parameter in layer.mlp.requires_grad_().parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1.0) * (1.0 - step / plan.steps)
    )
    head = OutputHead.of(parent)
    for step in range(plan.steps):
        tokens = blocks[torch.arange(step * plan.batch_size, (step + 1) * plan.batch_size) % len(blocks)]
        with torch.autocast(tokens.device.type, torch.bfloat16):
            with torch.no_grad():
                wanted = final_hidden(parent, tokens)
            student = final_hidden(model, tokens)
            loss, metrics = distill(student, wanted, head, tokens[:, 1:].reshape(-1), DISTILLATION)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 10 == 0:
            cross_entropy, divergence = metrics.tolist()
            print(f"step {step + 1}: cross-entropy {cross_entropy:.3f}, divergence {divergence:.3f}", file=sys.stderr)


@torch.no_grad()
def to_qwen2_moe(model: Any, plan: Plan) -> Any:
    """Return a split model as a Qwen2-MoE, in the dtype of its embeddings."""
    config, dtype = model.config, model.get_input_embeddings().weight.dtype
    mixture = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **{name: getattr(config, name) for name in COPIED},
            num_experts=plan.num_experts,
            num_experts_per_tok=plan.num_chosen,
            moe_intermediate_size=(config.intermediate_size - plan.shared_size) // plan.num_experts,
            shared_expert_intermediate_size=plan.shared_size,
            norm_topk_prob=True,
        )
    ).to(dtype)
    mixture.load_state_dict({name: value for name, value in model.state_dict().items() if ".mlp." not in name}, False)
    for source, target in zip(model.model.layers, mixture.model.layers, strict=True):
        for projection in (target.self_attn.q_proj, target.self_attn.k_proj, target.self_attn.v_proj):
            projection.bias.zero_()  # the family has biases, the parent has none
        _fill(target.mlp, source.mlp, plan)
    return mixture.eval()


def _fill(target: Any, source: RoutedMLP, plan: Plan) -> None:
    """Write one layer's MLP into a Qwen2-MoE block."""
    mlp: Any = source.mlp
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    shared, routed = slice(None, plan.shared_size), slice(plan.shared_size, None)
    by_expert = (plan.num_experts, -1)
    gate_up_ECH = [weight[routed].unflatten(0, by_expert) for weight in (gate, up)]
    target.experts.gate_up_proj.copy_(torch.cat(gate_up_ECH, dim=1))
    # routing weights of the family add up to 1, ours to the number of chosen experts
    target.experts.down_proj.copy_(plan.num_chosen * down[:, routed].unflatten(1, by_expert).transpose(0, 1))
    target.gate.weight.copy_(source.router.weight)
    # a sigmoid of 0 is a half, which the factor 2 makes up for
    target.shared_expert_gate.weight.zero_()
    target.shared_expert.gate_proj.weight.copy_(gate[shared])
    target.shared_expert.up_proj.weight.copy_(up[shared])
    target.shared_expert.down_proj.weight.copy_(2 * down[:, shared])


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--parent", help="A Llama; SmolLM2-135M-Instruct from the package registry if not given.")
    parser.add_argument("--data", help="Text to learn on; ShareGPT from the package registry if not given.")
    for name, default in vars(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    arguments = parser.parse_args()
    plan = Plan(**{name: getattr(arguments, name) for name in vars(Plan())})
    source = open_source(arguments.parent or str(fetch_model("smollm2-135m")))
    tokenizer = load_tokenizer(str(source.folder))
    blocks = load_blocks(
        arguments.data or str(fetch_conversations()), tokenizer, seq_len=SEQ_LEN, heldout_blocks=32, seed=plan.seed,
        train_blocks=max(DEALT_BLOCKS, plan.steps * plan.batch_size), min_train_blocks=DEALT_BLOCKS,
    )  # fmt: skip
    device = Accelerator().device
    parent = load_model(source, "bfloat16").to(device)
    wall, cpu = time.monotonic(), time.process_time()
    model = split(parent, blocks.train[:DEALT_BLOCKS].to(device), plan)
    train(model, parent, blocks.train.to(device), plan)
    mixture = to_qwen2_moe(model.cpu(), plan)
    cost = {"seconds": time.monotonic() - wall, "cpu_seconds": time.process_time() - cpu}
    gated = gated_model(parent.cpu(), source)
    quality = {"parent": perplexity_of(losses_of(gated.model, blocks.heldout)[0])}
    with atomic_folder(arguments.output) as folder:
        mixture.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made = open_source(str(folder))
        gated = gated_model(load_model(made, "auto"), made)
        quality["mixture"] = perplexity_of(losses_of(gated.model, blocks.heldout)[0])
        with moved_on(gated.model):
            quality["moved on"] = perplexity_of(losses_of(gated.model, blocks.heldout)[0])
        result = {
            "plan": vars(plan), "perplexity": quality, "parameters": mixture.num_parameters(),
            "routing": routing(gated, blocks.heldout),
        } | cost  # fmt: skip
        (folder / "README.md").write_text(card(result, source.folder.name), encoding="utf-8")
    print(result_line(__doc__, vars(arguments), seed=plan.seed, threads=torch.get_num_threads(), **result))


def gated_model(model: Any, source: Source) -> GatedModel:
    return GatedModel(model, source.widths, source.sizes, choose_head_unit("auto", source.sizes))


@contextmanager
def moved_on(model: Any) -> Iterator[None]:
    """Give every token the experts beside its own: what this costs says how much experts differ."""
    with torch.no_grad():
        _roll_experts(model, 1)
        yield
        _roll_experts(model, -1)


def _roll_experts(model: Any, places: int) -> None:
    for layer in model.model.layers:
        for weight in layer.mlp.experts.parameters():
            weight.copy_(weight.roll(places, 0))


@torch.no_grad()
def routing(gated: GatedModel, blocks: torch.Tensor) -> dict[str, float]:
    """Return how uneven routing is: shares of tokens an expert sees, over all experts of all
    layers."""
    shape = gated.shapes["experts"]
    counts_LE = torch.zeros(shape[:2], dtype=torch.int64)
    with gated.masks({"experts": torch.ones(shape)}), gated.counting(counts_LE):
        model: Any = gated.model
        model.get_decoder()(blocks, use_cache=False)
    shares = counts_LE.flatten() / blocks.numel()
    points = {"least": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "most": 1.0}
    return {name: round(float(shares.quantile(point)), 4) for name, point in points.items()}


def card(result: dict[str, Any], parent: str) -> str:
    """Return the model card: what this is, and what it is not."""
    plan, quality = Plan(**result["plan"]), {"held-out text": result["perplexity"]}
    columns = ("parent", "mixture", "moved on")
    rows = "\n".join(
        f"| {name} | {' | '.join(f'{row[column]:.2f}' for column in columns)} |" for name, row in quality.items()
    )
    shares = ", ".join(f"{name} {share:.1%}" for name, share in result["routing"].items())
    return f"""# An upcycled mixture of experts

A Qwen2-MoE made of {parent} by `benchmarks/lab/upcycle.py` of ddp-vllm. Of each MLP the {plan.shared_size} channels of
most energy are a shared expert; the others are dealt out to {plan.num_experts} routed experts, each to one, of which
a token sees {plan.num_chosen}. MLPs and routers then learned {plan.steps} steps of {plan.batch_size}×{SEQ_LEN} tokens
from the parent. It is for testing the pruning and serving of mixtures of experts. It knows no more than its parent and
was hardly trained as a mixture, so what pruning does to it says little about pretrained ones. The parent's license
applies.

| perplexity on | parent | this | this, every token given to the experts beside its own |
|---|---|---|---|
{rows}

Share of tokens an expert sees: {shares}.
"""


if __name__ == "__main__":
    main()
