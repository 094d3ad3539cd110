"""The loss mask of conversations, and that the cross-entropy is over its tokens if the recipe asks for that."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from chat_templates import PUBLISHED, tokenizer_of
from commands import passed
from runs import BLOCKS, Lab, pools_of, prune
from safetensors.torch import load_file

from ddp_prune.core.batches import Batches
from ddp_prune.core.trainer import Trainer
from ddp_prune.run import Run
from ddp_prune.text.blocks import Blocks, cut, select_loss_mask
from ddp_prune.text.documents import Document, read_documents
from ddp_prune.text.messages import Notes
from ddp_prune.text.rows import Rows
from ddp_prune.text.templates import ChatTemplate
from ddp_prune.text.tokens import tokenize
from ddp_vllm.errors import TextError
from ddp_vllm.masks import MASKS_FILE

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def lab(tiny_model: Path, tmp_path: Path) -> Lab:
    return Lab(tiny_model, tmp_path, "kv-group")


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"


def test_the_loss_mask_of_a_conversation_holds_the_assistants_words_and_the_end_of_its_turn(
    tokenizer: Any, load: Callable[..., Any], tmp_path: Path
) -> None:
    tokenizer.chat_template = TEMPLATE
    turns = [("user", "how many foxes"), ("assistant", "nine foxes jump"), ("user", "why"), ("assistant", "clouds")]
    rows = [{"messages": [{"role": role, "content": f"{words} {i}"} for role, words in turns]} for i in range(60)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    blocks = load(tmp_path / "chat.jsonl", tokenizer)
    stream = [(int(n), bool(s)) for n, s in zip(blocks.train.flatten(), blocks.loss_mask.flatten(), strict=True)]
    in_loss = "".join(tokenizer.decode([number]) if mask else "|" for number, mask in stream)
    answers = {part for part in in_loss.split("|") if part}
    assert {f"nine foxes jump {i}<eos>" for i in range(10, 20)} & answers
    assert not any("how" in part or "why" in part or "assistant" in part for part in answers)


REASONED = [
    ("user", "how many foxes jump"), ("assistant", "<think>\nthey are red\n</think>\n\nnine foxes"),
    ("user", "why"), ("assistant", "<think>\nof them\n</think>\n\n42 foxes do."),
]  # fmt: skip
ANSWERED = [("user", "how many"), ("assistant", " nine foxes\n"), ("user", "why"), ("assistant", "42 foxes do.")]
WHOLE = ["<think>\nthey are red\n</think>\n\nnine foxes", "<think>\nof them\n</think>\n\n42 foxes do."]
STRIPPED = ["nine foxes", "42 foxes do."]
GENERATED = {  # family: text in the loss without the token that ends a turn, for REASONED and for ANSWERED; that token
    "qwen3": ([WHOLE[1]], [" nine foxes\n", "42 foxes do."], "<|im_end|>"),
    "r1": ([], [" nine foxes\n", "42 foxes do."], "<｜end▁of▁sentence｜>"),
    "llama2": ([f" {words} " for words in WHOLE], [f" {words} " for words in STRIPPED], "</s>"),
}


def rendered(messages: list[dict[str, str]], tokenizer: Any) -> Document:
    rows = Rows(name="chat", num_rows=1, read=lambda _: iter([(0, {"messages": messages})]))
    return next(read_documents(rows, ChatTemplate(tokenizer), Notes()))


@pytest.mark.parametrize("family", PUBLISHED)
def test_under_published_templates_the_loss_is_on_what_the_assistant_generates(family: str) -> None:
    """R1 drops the thoughts of every turn, Qwen3 those of earlier turns: no server generates these answers. Other
    templates keep or strip the words."""
    tokenizer = tokenizer_of(family)
    *expected, end = GENERATED[family]
    for turns, answers in zip((REASONED, ANSWERED), expected, strict=True):
        messages = [{"role": role, "content": words} for role, words in turns]
        document = rendered(messages, tokenizer)
        assert document.text == tokenizer.apply_chat_template(messages, tokenize=False)
        (tokens,) = tokenize([document], tokenizer)
        assert not tokens.loss_mask[-1]  # the EOS between documents
        names = tokenizer.convert_ids_to_tokens(tokens.ids.tolist())
        in_loss = "".join(name if mask else "\0" for name, mask in zip(names, tokens.loss_mask, strict=True))
        in_loss = in_loss.translate({ord("Ġ"): " ", ord("Ċ"): "\n"}).replace("<0x0A>", "\n")
        in_loss = in_loss if family == "r1" else re.sub("▁+", " ", in_loss)
        if end == "</s>":  # such a tokenizer begins parts with a blank
            in_loss = re.sub("(\n|</?think>) ", r"\1", in_loss)
        assert [run for run in in_loss.split("\0") if run] == [answer + end for answer in answers]


@pytest.mark.parametrize("words", ["{{ m.content }}{{ m.content }}", "{{ m.content | length }}"])
def test_the_loss_mask_is_empty_if_a_template_hides_which_words_are_the_assistants(tokenizer: Any, words: str) -> None:
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>" + words + "{% endfor %}"
    turns = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "red foxes"}]
    (tokens,) = tokenize([rendered(turns, tokenizer)], tokenizer)
    assert not tokens.loss_mask.any()


def test_the_loss_is_on_all_of_other_text_and_of_conversations_without_a_template(
    load: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [{"text": f"a fox and {number} clouds"} for number in range(60)]
    turns = [{"role": "user", "content": "why do foxes jump"}, {"role": "assistant", "content": "clouds"}]
    rows += [{"messages": [*turns, {"role": "user", "content": str(number)}]} for number in range(60)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    blocks, lines = load(tmp_path / "mixed.jsonl"), list[str]()
    assert blocks.loss_mask.all()
    assert select_loss_mask(blocks, "assistant", "mixed.jsonl", lines.append) is None
    assert "60 conversations read as plain text, because the tokenizer has no chat template" in lines[0]
    assert lines[1] == (
        "conversations of mixed.jsonl were read as plain text (see above), so the loss covers all tokens"
    )


def test_an_excerpt_from_within_an_answer_is_in_the_loss(tokenizer: Any) -> None:
    """But not the EOS after the excerpt."""
    question, answer, rest = "<user>tell me     <assistant>", "words and more " * 20, "<eos><user>thanks<eos>"
    loss_mask = np.repeat([False, True, False], [len(question), len(answer), len(rest)])
    first, *middle, last = tokenize(cut(Document(question + answer + rest, loss_mask), 60), tokenizer)
    assert len(middle) > 2
    for tokens in middle:
        assert tokens.loss_mask[:-1].all() and not tokens.loss_mask[-1]
    for tokens in (first, last):
        assert tokens.loss_mask.any() and not tokens.loss_mask[:-1].all()


def test_masks_learn_from_the_cross_entropy_of_the_loss_mask(lab: Lab) -> None:
    """This holds for any micro-batches, although their sequences have unequally many tokens in the loss mask."""
    shares = torch.linspace(0, 0.6, 4).repeat(16)[:, None]
    loss_mask = torch.rand(BLOCKS.shape, generator=torch.Generator().manual_seed(0)) < shares
    model: Any = lab.gated.model
    with torch.no_grad():
        losses = F.cross_entropy(model(BLOCKS[:4]).logits[:, :-1].transpose(1, 2), BLOCKS[:4, 1:], reduction="none")
    wanted = losses[loss_mask[:4, 1:]].mean().item()
    moved = []
    for size in (1, 4):
        recipe = lab.recipe(micro_batch_size=size)
        batches = Batches(BLOCKS, recipe, Accelerator(), loss_mask)
        trainer = Trainer(lab.gated, batches, Run.alone(recipe), pools_of(lab.gated, recipe), Accelerator())
        assert trainer.step(0)["ce"] == pytest.approx(wanted, rel=1e-5)
        moved.append(trainer.gates.z["mlp"])
    torch.testing.assert_close(moved[0], moved[1], atol=1e-5, rtol=0)
    everything = lab.trainer()
    everything.step(0)
    assert not torch.allclose(everything.gates.z["mlp"], moved[0], atol=1e-3)


def test_text_outside_the_loss_mask_changes_neither_information_nor_scales(lab: Lab) -> None:
    """A step on four sequences equals one on these four and twelve others whose tokens are all masked out."""
    steps = []
    for size in (4, 16):
        recipe = lab.recipe(batch_size=size, distillation=0.0)
        loss_mask = torch.zeros(BLOCKS.shape, dtype=torch.bool)
        loss_mask[:4] = True
        batches = Batches(BLOCKS, recipe, Accelerator(), loss_mask)
        trainer = Trainer(lab.gated, batches, Run.alone(recipe), pools_of(lab.gated, recipe), Accelerator())
        trainer.step(0)
        steps.append((trainer.gates.information, trainer.gates.z))
    for kind in steps[0][0]:
        torch.testing.assert_close(steps[0][0][kind], steps[1][0][kind], rtol=1e-3, atol=1e-8)
        torch.testing.assert_close(steps[0][1][kind], steps[1][1][kind], rtol=1e-4, atol=1e-5)


def test_prune_takes_the_loss_on_an_assistants_turns_if_told(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)

    def chats(name: str, *roles: str) -> Path:
        rows = [{"messages": [{"role": role, "content": f"nine foxes {i} jump"} for role in roles]} for i in range(90)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    both, masks = chats("both.jsonl", "user", "assistant"), []
    for source in ("all", "assistant"):
        passed(prune(model, both, tmp_path / source, "--learn-from", source))
        masks.append(load_file(tmp_path / source / MASKS_FILE))
    assert any(not torch.equal(masks[0][name], masks[1][name]) for name in masks[0])
    result = passed(prune(model, chats("asked.jsonl", "user"), tmp_path / "asked", "--learn-from", "assistant"))
    assert "no turns of an assistant were found" in result.output


def test_text_without_an_assistants_words_is_refused() -> None:
    silent = torch.zeros(BLOCKS.shape, dtype=torch.bool)
    silent[:, 0] = True  # which no token predicts
    blocks = Blocks(train=BLOCKS, loss_mask=silent, heldout=BLOCKS, num_tokens=BLOCKS.numel())
    assert select_loss_mask(blocks, "all", "chats.jsonl", print) is None
    with pytest.raises(TextError, match=r"chats\.jsonl holds no words of an assistant"):
        select_loss_mask(blocks, "assistant", "chats.jsonl", print)
