"""Make a small mixture of experts with real language in it out of a dense model: an upcycled toy.

    python benchmarks/upcycle.py OUT [--parent MODEL] [--data TEXT] [--test wiki.test.raw --detokenise]

No pretrained mixture of experts can be had from a package registry. This makes one of SmolLM2-135M, without training.
Of each MLP the channels of most energy become a shared expert that sees every token. Each routed expert is a choice
among the others: those that carry most of what the tokens sent to it get from the MLP. Tokens go to the experts whose
channels keep most of their energy, and choices and tokens are improved in turn, as in k-means. The router is a linear
regression of that kept energy, so some experts are chosen far more often than others. A channel that all of a token's
experts hold counts in full, for their routing weights add up to 1; one that some hold counts by their weights; one
that none holds is lost. Attention, norms and embeddings are the parent's.

The result is a stock Qwen2-MoE: it has a shared expert, and transformers and vLLM know it without code of ours. It
knows no more than its parent, its experts overlap, its router was never trained, and what pruning does to it says
little about models pretrained as mixtures. It is there to have something real to prune, serve and measure.
The last line on stdout is JSON.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from ddp_prune.families import choose_head_unit
from ddp_prune.gates import GatedModel
from ddp_prune.perplexity import perplexity
from ddp_prune.source import load_model, open_source
from ddp_prune.tokens import load_blocks, load_tokenizer
from ddp_vllm.checkpoint import atomic_folder
from ddp_vllm.registry import fetch_conversations, fetch_model
from mask_quality import read_test_blocks

ROUNDS = 10  # of choosing channels and tokens in turn
RIDGE = 1e-2  # of the mean of the Gram matrix's diagonal
LOGIT_SCALE = 0.5  # standard deviation of the router's logits over experts: the best weighs more, not all
COPIED = (  # fields of a Llama config that a Qwen2-MoE has too
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act",
    "tie_word_embeddings", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of the mixture."""

    num_experts: int = 8
    expert_size: int = 512
    """Channels of a routed expert."""
    shared_size: int = 896
    """Channels of the shared expert; routed experts choose among the parent's others."""
    num_chosen: int = 2
    """Experts a token is sent to."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Split:
    """What becomes of one MLP. Legend: S shared channels, R others, E experts, C channels of one, H hidden size."""

    shared: torch.Tensor
    """int64 [S], channels of the parent."""
    experts: torch.Tensor
    """int64 [E, C], channels of the parent."""
    router: torch.Tensor
    """float32 [E, H]."""


@torch.no_grad()
def split_mlp(mlp: Any, x_TH: torch.Tensor, plan: Plan) -> Split:
    """Deal out the channels of one MLP by what it does with the inputs `x_TH`, [tokens, H]."""
    h_TI = (mlp.act_fn(mlp.gate_proj(x_TH)) * mlp.up_proj(x_TH)).float()
    energy_TI = h_TI.square() * mlp.down_proj.weight.float().square().sum(0)
    ranked_I = energy_TI.mean(0).argsort(descending=True, stable=True)
    shared_S, others_R = ranked_I.tensor_split([plan.shared_size])
    energy_TR = energy_TI[:, others_R]
    shares_TR = energy_TR / energy_TR.sum(1, keepdim=True).clamp_min(1e-30)
    chosen_EC = choose_channels(shares_TR, plan)
    kept_TE = shares_TR @ membership(chosen_EC, len(others_R)).T
    better_TE = kept_TE - kept_TE.mean(1, keepdim=True)
    router_EH = ridge(x_TH.float(), better_TE, RIDGE)
    logits_TE = x_TH.float() @ router_EH.T
    router_EH *= LOGIT_SCALE / logits_TE.std(1).mean().clamp_min(1e-30)
    return Split(shared=shared_S, experts=others_R[chosen_EC], router=router_EH)


def choose_channels(shares_TR: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return [E, C] positions in R; `shares_TR` says how much of a token's energy is in each channel.

    An expert holds the channels with most of the energy of its tokens; a token belongs to the experts that hold most
    of its own. Experts start from one random token each; one that loses all its tokens keeps its channels.
    """
    generator = torch.Generator().manual_seed(plan.seed)
    first_E = torch.randperm(len(shares_TR), generator=generator)[: plan.num_experts]
    chosen_EC = shares_TR[first_E].topk(plan.expert_size, dim=1).indices
    for _ in range(ROUNDS):
        kept_TE = shares_TR @ membership(chosen_EC, shares_TR.shape[1]).T
        tokens_TE = membership(kept_TE.topk(plan.num_chosen, dim=1).indices, plan.num_experts)
        energy_ER = tokens_TE.T @ shares_TR
        again_EC = energy_ER.topk(plan.expert_size, dim=1).indices
        chosen_EC = torch.where(tokens_TE.any(0)[:, None], again_EC, chosen_EC)
    return chosen_EC


def membership(indices_AB: torch.Tensor, size: int) -> torch.Tensor:
    """Return float32 [A, size], 1 where a row lists the position."""
    return torch.zeros(len(indices_AB), size).scatter(1, indices_AB, 1.0)


def ridge(x_TA: torch.Tensor, y_TB: torch.Tensor, strength: float) -> torch.Tensor:
    """Return the [B, A] that maps x to y with least squares, drawn towards 0."""
    gram_AA = x_TA.T @ x_TA
    gram_AA.diagonal().add_(strength * gram_AA.diagonal().mean() + 1e-12)
    return torch.cholesky_solve(x_TA.T @ y_TB, torch.linalg.cholesky(gram_AA)).T


@torch.no_grad()
def upcycle(parent: Any, blocks: torch.Tensor, plan: Plan) -> Any:
    """Return the mixture of a Llama, in the parent's dtype; `blocks` (int64 [num_blocks, seq_len]) is read once."""
    config, dtype = parent.config, parent.dtype
    model = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **{name: getattr(config, name) for name in COPIED},
            num_experts=plan.num_experts,
            num_experts_per_tok=plan.num_chosen,
            moe_intermediate_size=plan.expert_size,
            shared_expert_intermediate_size=plan.shared_size,
            norm_topk_prob=True,
        )
    ).to(dtype)
    model.load_state_dict({name: value for name, value in parent.state_dict().items() if ".mlp." not in name}, False)
    hooks = []
    for source, target in zip(parent.model.layers, model.model.layers, strict=True):
        for projection in (target.self_attn.q_proj, target.self_attn.k_proj, target.self_attn.v_proj):
            projection.bias.zero_()  # the family has biases, the parent has none

        def fill_from_inputs(mlp: Any, args: Any, _output: Any, target: Any = target.mlp) -> None:
            fill(target, mlp, split_mlp(mlp, args[0].flatten(0, -2), plan))

        hooks.append(source.mlp.register_forward_hook(fill_from_inputs))
    parent.get_decoder()(blocks, use_cache=False)
    for hook in hooks:
        hook.remove()
    return model.eval()


def fill(target: Any, mlp: Any, split: Split) -> None:
    """Write the parts of one MLP into a Qwen2-MoE block."""
    gate_up_ECH = [projection.weight[split.experts] for projection in (mlp.gate_proj, mlp.up_proj)]
    target.experts.gate_up_proj.copy_(torch.cat(gate_up_ECH, dim=1))
    target.experts.down_proj.copy_(mlp.down_proj.weight[:, split.experts].transpose(0, 1))
    target.gate.weight.copy_(split.router)
    target.shared_expert_gate.weight.zero_()  # a sigmoid of 0 is a half, which the factor 2 makes up for
    target.shared_expert.gate_proj.weight.copy_(mlp.gate_proj.weight[split.shared])
    target.shared_expert.up_proj.weight.copy_(mlp.up_proj.weight[split.shared])
    target.shared_expert.down_proj.weight.copy_(2 * mlp.down_proj.weight[:, split.shared])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--parent", help="A Llama; SmolLM2-135M-Instruct from the package registry if not given.")
    parser.add_argument("--data", help="Text to calibrate on; ShareGPT from the package registry if not given.")
    parser.add_argument("--test", type=Path, help="Text for perplexity that nothing was calibrated on.")
    parser.add_argument("--detokenise", action="store_true", help="Undo WikiText's spacing, as lm-eval does.")
    parser.add_argument("--blocks", type=int, default=16, help="Sequences of 256 tokens to calibrate on.")
    for name, default in vars(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    arguments = parser.parse_args()
    plan = Plan(**{name: getattr(arguments, name) for name in vars(Plan())})
    cpu = time.process_time()
    source = open_source(arguments.parent or str(fetch_model("smollm2-135m")))
    tokenizer = load_tokenizer(str(source.folder))
    blocks = load_blocks(
        arguments.data or str(fetch_conversations()), tokenizer, seq_len=256, train_blocks=arguments.blocks,
        heldout_blocks=16, min_train_blocks=arguments.blocks, seed=plan.seed,
    )  # fmt: skip
    texts = {"held-out": blocks.heldout}
    if arguments.test:
        texts["test"] = read_test_blocks(arguments.test, tokenizer, detokenise=arguments.detokenise)
    parent = load_model(source, "auto")
    model = upcycle(parent, blocks.train, plan)
    cpu_seconds = time.process_time() - cpu
    gated = GatedModel(parent, source.family, source.sizes, choose_head_unit("auto", source.sizes))
    quality = {name: {"parent": perplexity(gated, None, text)} for name, text in texts.items()}
    with atomic_folder(arguments.output) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made = open_source(str(folder))
        gated = GatedModel(load_model(made, "auto"), made.family, made.sizes, "auto")
        for name, text in texts.items():
            quality[name]["toy"] = perplexity(gated, None, text)
        result = {
            "plan": vars(plan), "perplexity": quality, "cpu_seconds": cpu_seconds,
            "parameters": model.num_parameters(), "routing": routing(gated, blocks.heldout), "overlap": overlap(model),
        }  # fmt: skip
        (folder / "README.md").write_text(card(result, source.folder.name), encoding="utf-8")
    print(json.dumps(result))


@torch.no_grad()
def routing(gated: GatedModel, blocks: torch.Tensor) -> dict[str, float]:
    """Return how uneven routing is: shares of tokens an expert sees, over all experts of all layers."""
    shape = gated.shapes["experts"]
    counts_LE = torch.zeros(shape[:2], dtype=torch.int64)
    with gated.masks({"experts": torch.ones(shape)}), gated.counting(counts_LE):
        model: Any = gated.model
        model.get_decoder()(blocks, use_cache=False)
    shares = counts_LE.flatten() / blocks.numel()
    points = {"least": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "most": 1.0}
    return {name: round(float(shares.quantile(point)), 4) for name, point in points.items()}


def overlap(model: Any) -> float:
    """Return what share of its channels an expert has in common with another of its layer, on average."""
    shared = []
    for layer in model.model.layers:
        gate_ECH = layer.mlp.experts.gate_up_proj.detach().chunk(2, dim=1)[0]
        num_experts, size, _ = gate_ECH.shape
        holders = gate_ECH.flatten(0, 1).unique(dim=0, return_counts=True)[1]  # a row of the gate tells a channel
        shared.append(int((holders * (holders - 1)).sum()) / (num_experts * (num_experts - 1) * size))
    return sum(shared) / len(shared)


def card(result: dict[str, Any], parent: str) -> str:
    """Return the model card: what this is, and what it is not."""
    plan, quality = Plan(**result["plan"]), result["perplexity"]
    rows = "\n".join(f"| {name} | {row['parent']:.2f} | {row['toy']:.2f} |" for name, row in quality.items())
    shares = ", ".join(f"{name} {share:.1%}" for name, share in result["routing"].items())
    return f"""# An upcycled toy

A Qwen2-MoE made of {parent} by `benchmarks/upcycle.py` of ddp-vllm, without training. Of each MLP the
{plan.shared_size} channels of most energy are a shared expert; each of {plan.num_experts} routed experts holds
{plan.expert_size} of the others, those that matter most to its tokens, so experts overlap. A token sees
{plan.num_chosen} of them; the router is a linear regression.
It is for testing the pruning and serving of mixtures of experts. It knows no more than its parent and was never
trained as a mixture, so what pruning does to it says little about pretrained ones. The parent's licence applies.

| perplexity on | parent | this |
|---|---|---|
{rows}

Two experts of a layer have {result["overlap"]:.0%} of their channels in common. Share of tokens an expert sees:
{shares}.
"""


if __name__ == "__main__":
    main()
