"""Evaluates the dense, pruned and recovered model: perplexity on held-out text, and answers to ten
fixed prompts."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig

from ddp_prune.core.decoder import checkpoint_layers, lent
from ddp_prune.core.loss import OutputHead, agreement, final_hidden, negative_log_likelihood, perplexity_of
from ddp_prune.text.templates import ChatTemplate, Rendered, leading_bos
from ddp_vllm.dimensions import longest_context
from ddp_vllm.errors import Printer
from ddp_vllm.intervals import mean_loss, t_quantile
from ddp_vllm.proof import MOST_TOKENS, ODD, PROSE, Reference, positions_in
from ddp_vllm.read_back import logits_of, read_texts

PROMPTS = (  # one question of each common kind, written before any model had answered
    "What are the three primary colors?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "What is 17 + 25?",
    "Translate into French: Good morning, how are you?",
    "Write a Python function that reverses a string.",
    "Name the capital of Japan and one thing it is famous for.",
    "Give me three tips for staying healthy.",
    "Who wrote Romeo and Juliet, and what is it about?",
    "Rewrite this politely: Send me the report now.",
)
SAMPLE_TOKENS = 64  # per answer, at most
STAGES = ("dense", "pruned", "recovered")
BOS_BLOCKS, BOS_TOKENS = 4, 256  # held-out blocks of which so many tokens are read with and without BOS
MOST_TEXT = 2048  # held-out tokens by which the tokenizer of a written folder is compared
BOS_GAIN = 0.05  # nats per token; models that rely on BOS lose far more without it


class Evaluation:
    """The losses, the agreement with the first model and the samples of one model after the
    other."""

    def __init__(
        self,
        texts: Mapping[str, Tensor],
        tokenizer: Any,
        loss_masks: Mapping[str, Tensor] | None = None,
        print_line: Printer = lambda _: None,
    ) -> None:
        """Choose the texts.

        texts: blocks by the name of the text, int64 [num_blocks, seq_len].
        loss_masks: bool, shaped as `texts`: the tokens to evaluate; None: all of them.
        print_line: prints a line before the evaluation of a model, which takes minutes on a CPU.
        """
        self.texts, self.tokenizer, self.print_line = texts, tokenizer, print_line
        masks = loss_masks or {name: torch.ones_like(blocks, dtype=torch.bool) for name, blocks in texts.items()}
        self.loss_masks = {name: mask[:, 1:] for name, mask in masks.items()}  # of predicted tokens
        self.block_tokens: dict[str, list[int]] = {name: mask.sum(1).tolist() for name, mask in self.loss_masks.items()}
        self.losses: dict[str, dict[str, list[float]]] = {name: {} for name in texts}
        self.agreements: dict[str, dict[str, dict[str, float]]] = {name: {} for name in texts}
        self.answers: dict[str, list[str]] = {}
        self.first: tuple[OutputHead, dict[str, list[Tensor]]] | None = None

    def evaluate(self, who: str, model: Any) -> None:
        """Compute the losses and samples of a model, in its dtype and with the attention that
        serving uses."""
        num_blocks = sum(map(len, self.texts.values()))
        self.print_line(f"evaluating the {who} model: {num_blocks:,} held-out sequences, {len(PROMPTS)} answers")
        with lent(model):
            checkpoint_layers(model, False)
            if model._supports_sdpa and not model.config.get_text_config().to_dict().get("attn_logit_softcapping"):
                model.set_attn_implementation("sdpa")
            self.evaluate_texts(who, model)
            try:
                self.answers[who] = sample(model, self.tokenizer)
            except Exception as error:  # answers illustrate the report: a model that cannot generate is pruned without
                reason = shorten(f"{type(error).__name__}: {error}", 200)
                self.print_line(f"the report will lack answers of the {who} model, which cannot generate ({reason})")

    def evaluate_texts(self, who: str, model: Any) -> None:
        """Compute the losses of a model, and its agreement with the first model."""
        head, hidden = OutputHead.of(model), dict[str, list[Tensor]]()
        for name, blocks in self.texts.items():
            self.losses[name][who], hidden[name] = losses_of(model, blocks, self.loss_masks[name])
        if self.first is None:
            self.first = (
                head,
                {name: [state.cpu() for state in states] for name, states in hidden.items()},
            )
            return
        first_head, first_hidden = self.first
        for name, states in hidden.items():
            pairs = zip(states, first_hidden[name], strict=True)
            sums = [agreement(here, head, first.to(first_head.weight), first_head) for here, first in pairs]
            divergence, agreed = (sum(values) / sum(map(len, states)) for values in zip(*sums, strict=True))
            # as in `perplexity_of`
            kl = math.inf if math.isnan(divergence) else max(0.0, divergence)
            self.agreements[name][who] = {"kl": kl, "top1": agreed}

    def losses_of(self, model: Any) -> dict[str, list[float]]:
        """Return the loss of a model in each block of each text, in nats per token; nothing is kept."""
        return {name: losses_of(model, blocks, self.loss_masks[name])[0] for name, blocks in self.texts.items()}

    def perplexity(self, text: str) -> dict[str, Any]:
        """Return each model's perplexity on a text, its losses by block, and its agreement with the
        first model."""
        losses, block_tokens = self.losses[text], self.block_tokens[text]
        metrics: dict[str, Any] = {who: perplexity_of(values, block_tokens) for who, values in losses.items()}
        metrics |= {"tokens": sum(block_tokens), "block_losses": losses, "block_tokens": block_tokens}
        return metrics | {"agreement": self.agreements[text]}

    def samples(self) -> dict[str, Any]:
        """Return the prompts, and the answers of each model."""
        return {"prompts": list(PROMPTS) if self.answers else [], "answers": self.answers}

    def summary(self, text: str) -> str:
        """Return a line with the perplexity of each model on a text."""
        metrics = self.perplexity(text)
        values = " → ".join(f"{who} {metrics[who]:.2f}" for who in self.losses[text])
        return f"perplexity on held-out text of {text}: {values}"

    def recovery_summary(self) -> Iterator[str]:
        """Yield a line per text with the perplexities, and a warning if recovery made the model
        worse on it."""
        for name, losses in self.losses.items():
            block_tokens = self.block_tokens[name]
            dense, pruned, recovered = (mean_loss(losses[who], block_tokens)[0] for who in STAGES)
            share = (
                f", {(pruned - recovered) / (pruned - dense):.0%} of the lost log-perplexity"
                if pruned > dense + 0.01
                else ""
            )
            yield f"{self.summary(name)}{share}"
            rises = [after - before for after, before in zip(losses["recovered"], losses["pruned"], strict=True)]
            rise, error = mean_loss(rises, block_tokens)
            if not rise <= 2 * (error or 0.0):  # NaN too
                yield f"worse than before recovery on {name}; add text of that kind, or recover for fewer minutes"


def reference_of(model: Any, tokenizer: Any, blocks: Tensor | None = None, tolerance: float = 0.0) -> Reference:
    """Return what a written folder must repeat of the model in memory.

    tokenizer: the dense model's; None if it has none. blocks: held-out text, int64 [num_blocks,
    seq_len]; None: a text for models that were given none.
    """
    texts, tokens = [PROSE, ODD], [*Reference.tokens]
    if tokenizer and blocks is None:
        tokens = tokenizer(PROSE)["input_ids"]
    elif blocks is not None:
        texts, tokens = [tokenizer.decode(blocks.flatten()[:MOST_TEXT]), ODD], blocks[0, :MOST_TOKENS].tolist()
    read = tokenizer and read_texts(tokenizer, texts)
    if hasattr(tokenizer, "stored_chat_template"):  # of `load_tokenizer`, which may take a processor's instead
        read["templates"] = [str(tokenizer.stored_chat_template)]
    return Reference(
        texts=texts,
        read=read,
        tokens=tokens,
        logits=logits_of(model, tokens, positions_in(tokens)).numpy(),
        dtype=str(model.dtype).removeprefix("torch."),
        tolerance=tolerance,
    )


@torch.no_grad()
def bits_of(model: Any, tokenizer: Any, texts: Sequence[str], max_length: int | None = None) -> tuple[list[float], int]:
    """Return the bits that a model requires for each text, by which models with different tokens
    compare, and the number of its tokens. A text begins after BOS, or EOS if there is none.

    max_length: tokens that the model reads at once, by default as many as its config states. Each
        further part of a longer text begins after BOS too.
    """
    width = (max_length or longest_context(model.config.get_text_config().to_dict()) or sys.maxsize) - 1
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    head, bits, num_tokens = OutputHead.of(model), list[float](), 0
    for text in texts:
        ids, nats = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], 0.0
        for start in range(0, len(ids), width):
            tokens = torch.tensor([[first or 0, *ids[start : start + width]]], device=head.weight.device)
            nats += negative_log_likelihood(final_hidden(model, tokens), head, tokens[0, 1:])
        bits.append(math.inf if math.isnan(nats) else nats / math.log(2.0))
        num_tokens += len(ids)
    return bits, num_tokens


@torch.no_grad()
def losses_of(model: Any, blocks: Tensor, loss_mask: Tensor | None = None) -> tuple[list[float], list[Tensor]]:
    """Return a model's mean loss on each block in nats per token, and the hidden states of the
    predicted tokens.

    blocks: int64 [num_blocks, seq_len]. loss_mask: bool [num_blocks, seq_len − 1]: the predicted
        tokens to evaluate; None: all of them.
    """
    loss_mask = torch.ones_like(blocks[:, 1:], dtype=torch.bool) if loss_mask is None else loss_mask
    head, losses, hidden = OutputHead.of(model), list[float](), list[Tensor]()
    for tokens, mask in zip(blocks.to(head.weight.device), loss_mask.to(head.weight.device), strict=True):
        states, labels = final_hidden(model, tokens[None])[mask], tokens[1:][mask]
        losses.append(negative_log_likelihood(states, head, labels) / len(labels))
        hidden.append(states)
    return losses, hidden


def bos_warning(model: Any, name: str, tokenizer: Any, blocks: Tensor) -> str:
    """Return a warning if the tokenizer omits the BOS token of the model's config and the model
    needs it; else "".

    name: of the model. blocks: held-out text, int64 [num_blocks, seq_len]; with and without BOS,
    the same tokens are predicted.
    """
    bos = getattr(model.config.get_text_config(), "bos_token_id", None)
    head, kept = OutputHead.of(model), blocks[:BOS_BLOCKS, :-1][:, :BOS_TOKENS]
    if type(bos) is not int or not 0 <= bos < len(head.weight) or leading_bos(tokenizer) or not kept[:, 1:].numel():
        return ""
    is_predicted = torch.ones_like(kept, dtype=torch.bool)
    is_predicted[:, 0] = False  # without BOS nothing precedes it
    without, _ = losses_of(model, kept)
    after, _ = losses_of(model, F.pad(kept, (1, 0), value=bos), is_predicted)
    gain, error = mean_loss([one - other for one, other in zip(without, after, strict=True)])
    if gain < max(BOS_GAIN, t_quantile(len(kept) - 1) * (error or 0.0)):
        return ""
    token = tokenizer.convert_ids_to_tokens(bos)
    return (
        f"warning: the tokenizer of {name} omits BOS, with which the model's perplexity on held-out text is "
        f"{perplexity_of(after):.2f} instead of {perplexity_of(without):.2f}; add it: "
        f"t = transformers.AutoTokenizer.from_pretrained({name!r}, bos_token={token!r}); t.add_bos_token = True; "
        f"t.save_pretrained({name!r})"
    )


@torch.no_grad()
def sample(model: Any, tokenizer: Any) -> list[str]:
    """Return a model's greedy answers to PROMPTS, which are rendered by the chat template if there
    is one."""
    prompts, is_rendered = list(PROMPTS), False
    if tokenizer.chat_template:
        template = ChatTemplate(tokenizer)
        questions = [[{"role": "user", "content": prompt}] for prompt in prompts]
        if isinstance(template.render(questions[0]), Rendered):  # else it rejects a single question
            prompts, is_rendered = [template.text(question, prompt=True) for question in questions], True
    # the model may have no embedding for its own padding token
    tokenizer.pad_token = tokenizer.eos_token
    options = {"add_special_tokens": not is_rendered, "padding": True, "padding_side": "left"}
    tokens = tokenizer(prompts, return_tensors="pt", **options).to(model.device)
    ends = model.generation_config.eos_token_id or []
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    # the model's own may set penalties, beams or sampling
    model.generation_config = GenerationConfig(
        max_new_tokens=SAMPLE_TOKENS, do_sample=False, eos_token_id=sorted(ends), pad_token_id=tokenizer.eos_token_id
    )
    # the slice of the last tokens is not contiguous, for which a CPU would copy the head's weight
    # once per prompt
    with model.get_output_embeddings().register_forward_pre_hook(lambda _, states: (states[0].contiguous(),)):
        output = model.generate(**tokens)[:, tokens["input_ids"].shape[1] :]
    return [answer.strip() for answer in tokenizer.batch_decode(output, skip_special_tokens=True)]
