"""What the dense, the pruned and the recovered model make of held-out text, and of ten prompts that nobody picked."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from ddp_prune.loss import OutputHead, agreement, final_hidden, negative_log_likelihood, perplexity_of
from ddp_prune.memory import checkpoint_layers
from ddp_prune.templates import Templates
from ddp_prune.text import leading_bos
from ddp_vllm.evaluations import mean_loss

PROMPTS = (  # a question of each kind that people ask first, written down before any model had answered
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
LONGEST = 64  # tokens of an answer
BOS_BLOCKS = 4  # held-out blocks that are read with and without BOS
BOS_GAIN = 0.05  # nats a token; models that lean on BOS lose far more without it


class Exam:
    """Losses, agreement with the first model, and answers, model by model."""

    def __init__(
        self, texts: Mapping[str, torch.Tensor], tokenizer: Any, scored: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """texts: held-out blocks by the name of the text, int64 [num_blocks, seq_len]. scored: of each of them, bool,
        the tokens that count; None: all."""
        self.texts, self.tokenizer, self.scored = texts, tokenizer, scored or {}
        self.losses: dict[str, dict[str, list[float]]] = {name: {} for name in texts}
        self.agreements: dict[str, dict[str, dict[str, float]]] = {name: {} for name in texts}
        self.answers: dict[str, list[str]] = {}
        self.first: tuple[OutputHead, dict[str, list[torch.Tensor]]] | None = None

    def take(self, who: str, model: Any) -> None:
        """Let a model read and answer, in its number format and with attention as where it is used."""
        checkpoint_layers(model, False)
        if not model.config.to_dict().get("attn_logit_softcapping"):
            model.set_attn_implementation("sdpa")
        self.read(who, model)
        self.answers[who] = _answers(model, self.tokenizer)

    @torch.no_grad()
    def read(self, who: str, model: Any) -> None:
        """Let a model read; the first one is what others are compared with."""
        head, hidden = OutputHead.of(model), dict[str, list[torch.Tensor]]()
        for name, blocks in self.texts.items():
            self.losses[name][who], hidden[name] = [], []
            for tokens, counts in zip(blocks, self._counting(name), strict=True):
                here, labels = final_hidden(model, tokens[None].to(head.weight.device)), tokens[1:][counts]
                here, labels = here[counts.to(here.device)], labels.to(here.device)
                self.losses[name][who].append(negative_log_likelihood(here, head, labels) / len(labels))
                hidden[name].append(here)
        if self.first is None:
            self.first = head, {name: [each.cpu() for each in states] for name, states in hidden.items()}
            return
        first_head, before = self.first
        for name, states in hidden.items():
            pairs = zip(states, before[name], strict=True)
            each = [agreement(here, head, there.to(here), first_head) for here, there in pairs]
            divergence, alike = (sum(values) / sum(map(len, states)) for values in zip(*each, strict=True))
            self.agreements[name][who] = {"kl": max(0.0, divergence), "top1": alike}

    def perplexity(self, text: str) -> dict[str, Any]:
        """Return the perplexity of a text by each model, how near it is to the first, and what it is made of."""
        losses, counted = self.losses[text], self._counted(text)
        found: dict[str, Any] = {who: perplexity_of(values, counted) for who, values in losses.items()}
        found |= {"tokens": sum(counted) if text in self.scored else self.texts[text].numel()}
        return found | {"block_losses": losses, "block_tokens": counted, "agreement": self.agreements[text]}

    def _counting(self, text: str) -> torch.Tensor:
        """Return which predicted tokens count, bool [num_blocks, seq_len − 1]."""
        return self.scored.get(text, torch.ones_like(self.texts[text], dtype=torch.bool))[:, 1:]

    def _counted(self, text: str) -> list[int]:
        """Return how many predicted tokens of each block count."""
        counted: list[int] = self._counting(text).sum(1).tolist()
        return counted

    def said(self) -> dict[str, Any]:
        """Return prompts and answers."""
        return {"prompts": list(PROMPTS), "answers": self.answers}

    def sentences(self) -> Iterator[str]:
        """Yield what came of the recovery, a line a text, and what got worse."""
        for name, by in self.losses.items():
            counted = self._counted(name)
            dense, pruned, recovered = (mean_loss(by[who], counted)[0] for who in ("dense", "pruned", "recovered"))
            back = f", {(pruned - recovered) / (pruned - dense):.0%} of what was lost" if pruned > dense + 0.01 else ""
            values = " → ".join(f"{who} {perplexity_of(by[who], counted):.2f}" for who in by)
            yield f"perplexity on held-out text of {name}: {values}{back}"
            rises = [after - before for after, before in zip(by["recovered"], by["pruned"], strict=True)]
            rise, error = mean_loss(rises, counted)
            if rise > 2 * (error or 0.0):
                yield f"worse than before recovery on {name}; add text of that kind, or recover for fewer minutes"


@torch.no_grad()
def bos_warning(model: Any, name: str, tokenizer: Any, blocks: torch.Tensor) -> str:
    """Return a line on BOS, or "": where the tokenizer leaves out the one of the model's config and the model needs it.

    name: of the model. blocks: held-out text, int64 [num_blocks, seq_len]; both times the same tokens are predicted.
    """
    bos = model.config.get_text_config().bos_token_id
    head, kept = OutputHead.of(model), blocks[:BOS_BLOCKS, :-1]
    if type(bos) is not int or not 0 <= bos < len(head.weight) or leading_bos(tokenizer) or not kept[:, 1:].numel():
        return ""
    found = list[tuple[float, float]]()
    for tokens in kept.to(head.weight.device):
        states = final_hidden(model, tokens[None]), final_hidden(model, F.pad(tokens, (1, 0), value=bos)[None])[1:]
        without, after = (negative_log_likelihood(each, head, tokens[1:]) / len(tokens[1:]) for each in states)
        found.append((without, after))
    gain, error = mean_loss([without - after for without, after in found])
    if gain < max(BOS_GAIN, 2 * (error or 0.0)):
        return ""
    without, after = (perplexity_of(values) for values in zip(*found, strict=True))
    token = tokenizer.convert_ids_to_tokens(bos)
    return (
        f"warning: the tokenizer of {name} leaves out BOS, with which the model reads held-out text at perplexity "
        f"{after:.2f} instead of {without:.2f}; add it: t = transformers.AutoTokenizer.from_pretrained({name!r}, "
        f"bos_token={token!r}); t.add_bos_token = True; t.save_pretrained({name!r})"
    )


def _answers(model: Any, tokenizer: Any) -> list[str]:
    """Return what a model goes on with after each prompt, by its chat template if it has one; the likeliest tokens."""
    prompts, has_turns = list(PROMPTS), False
    if tokenizer.chat_template:
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        with Templates(tokenizer) as templates:
            arranged = [text for text in templates.render(turns, add_generation_prompt=True) if text is not None]
        if len(arranged) == len(prompts):  # else the template takes no single question
            prompts, has_turns = arranged, True
    return [text.strip() for text in go_on(model, tokenizer, prompts, LONGEST, add_special_tokens=not has_turns)]


@torch.no_grad()
def go_on(
    model: Any, tokenizer: Any, prompts: Sequence[str], longest: int, *, add_special_tokens: bool = True
) -> list[str]:
    """Return what a model writes after each text; the likeliest tokens, `longest` at most."""
    tokenizer.pad_token = tokenizer.eos_token  # its own may be one that the model has no embedding of
    options = {"add_special_tokens": add_special_tokens, "padding": True, "padding_side": "left"}
    tokens = tokenizer(list(prompts), return_tensors="pt", **options).to(model.device)
    ends = model.generation_config.eos_token_id or []
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    model.generation_config = GenerationConfig(  # its own may ask for penalties, beams or chance
        max_new_tokens=longest, do_sample=False, eos_token_id=sorted(ends), pad_token_id=tokenizer.eos_token_id
    )
    output = model.generate(**tokens)
    said = output[:, tokens["input_ids"].shape[1] :]
    return list(tokenizer.batch_decode(said, skip_special_tokens=True))
