"""Which tokens of conversations count, and that only their cross-entropy is learned from where that is asked."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from chat_templates import PUBLISHED, tokenizer_of
from runs import BLOCKS, Lab, pools_of, prune
from safetensors.torch import load_file

from ddp_prune.batches import Batches
from ddp_prune.documents import documents
from ddp_prune.run import Run
from ddp_prune.templates import BEGIN, END, Templates
from ddp_prune.text import Blocks, counting, cut, encode, pack
from ddp_prune.trainer import Trainer
from ddp_vllm.errors import TextError
from ddp_vllm.masks import MASKS_FILE

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def lab(tiny_model: Path, tmp_path: Path) -> Lab:
    return Lab(tiny_model, tmp_path, "kv-group")


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"


def test_in_conversations_the_assistants_words_count_and_the_end_of_its_turn(
    tokenizer: Any, load: Callable[..., Any], tmp_path: Path
) -> None:
    tokenizer.chat_template = TEMPLATE
    turns = [("user", "how many foxes"), ("assistant", "nine foxes jump"), ("user", "why"), ("assistant", "clouds")]
    rows = [{"messages": [{"role": role, "content": f"{said} {i}"} for role, said in turns]} for i in range(60)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    blocks = load(tmp_path / "chat.jsonl", tokenizer)
    stream = [(int(n), bool(s)) for n, s in zip(blocks.train.flatten(), blocks.scored.flatten(), strict=True)]
    said = "".join(tokenizer.decode([number]) if scored else "|" for number, scored in stream)
    answers = {part for part in said.split("|") if part}
    assert {f"nine foxes jump {i}<eos>" for i in range(10, 20)} & answers
    assert all(
        part.removesuffix("<eos>").rpartition(" ")[0] in ("nine foxes jump", "clouds")
        for part in answers
        if "<eos>" in part and part[0] in "nc"
    )
    assert not any("how" in part or "why" in part or "assistant" in part for part in answers)


REASONED = [
    ("user", "how many foxes jump"), ("assistant", "<think>\nthey are red\n</think>\n\nnine foxes"),
    ("user", "why"), ("assistant", "<think>\nof them\n</think>\n\n42 foxes do."),
]  # fmt: skip
ANSWERED = [("user", "how many"), ("assistant", " nine foxes\n"), ("user", "why"), ("assistant", "42 foxes do.")]
WHOLE = ["<think>\nthey are red\n</think>\n\nnine foxes", "<think>\nof them\n</think>\n\n42 foxes do."]
STRIPPED = ["nine foxes", "42 foxes do."]
GENERATED = {  # family: what enters the loss, without the token that ends a turn, of REASONED and of ANSWERED; its end
    "qwen3": (["nine foxes", WHOLE[1]], [" nine foxes\n", "42 foxes do."], "<|im_end|>"),
    "r1": (["\n\nnine foxes", "\n\n42 foxes do."], [" nine foxes\n", "42 foxes do."], "<｜end▁of▁sentence｜>"),
    "llama2": ([f" {each} " for each in WHOLE], [f" {each} " for each in STRIPPED], "</s>"),
    "llama31": (WHOLE, STRIPPED, "<|eot_id|>"),
    "mistral": ([f" {each}" for each in WHOLE], [f" {each}" for each in STRIPPED], "</s>"),
    "chatml": (WHOLE, [" nine foxes\n", "42 foxes do."], "<|im_end|>"),
    "gemma": (WHOLE, STRIPPED, "<end_of_turn>"),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_under_published_templates_the_loss_is_on_what_the_assistant_generates(family: str) -> None:
    """R1 drops the reasoning of every turn and Qwen3 that of earlier turns; others keep or strip the words."""
    tokenizer = tokenizer_of(family)
    *expected, end = GENERATED[family]
    for turns, answers in zip((REASONED, ANSWERED), expected, strict=True):
        messages = [{"role": role, "content": words} for role, words in turns]
        with Templates(tokenizer) as templates:
            (text,) = documents([{"messages": messages}], templates, "chat")
        assert re.sub(f"[{BEGIN}{END}]", "", text) == tokenizer.apply_chat_template(messages, tokenize=False)
        tokens = encode([text], tokenizer)[0][:-1]
        names = tokenizer.convert_ids_to_tokens([int(each) for each in tokens.clip(0)])
        said = "".join(name if token >= 0 else "\0" for name, token in zip(names, tokens, strict=True))
        said = said.translate({ord("Ġ"): " ", ord("Ċ"): "\n"}).replace("<0x0A>", "\n")
        said = said if family == "r1" else re.sub("▁+", " ", said)
        said = (
            re.sub("(\n|</?think>) ", r"\1", said) if end == "</s>" else said
        )  # such a tokenizer begins parts with one
        assert [run for run in said.split("\0") if run] == [answer + end for answer in answers]


@pytest.mark.parametrize("words", ["{{ m.content }}{{ m.content }}", "{{ m.content | length }}"])
def test_nothing_counts_where_a_template_hides_which_words_are_the_assistants(tokenizer: Any, words: str) -> None:
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>" + words + "{% endfor %}"
    turns = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "red foxes"}]
    with Templates(tokenizer) as templates:
        (text,) = documents([{"messages": turns}], templates, "chat")
    assert (encode([text], tokenizer)[0] < 0).all()


def test_all_counts_of_other_text_and_of_conversations_without_a_template(
    load: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [{"text": f"a fox and {number} clouds"} for number in range(60)]
    turns = [{"role": "user", "content": "why do foxes jump"}, {"role": "assistant", "content": "clouds"}]
    rows += [{"messages": [*turns, {"role": "user", "content": str(number)}]} for number in range(60)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load(tmp_path / "mixed.jsonl").scored.all()


def test_a_piece_from_the_midst_of_an_answer_counts(tokenizer: Any) -> None:
    text = f"<user>tell me{'':5}<assistant>{BEGIN}{'words and more ' * 20}{END}<eos><user>thanks<eos>"
    first, *middle, last = cut(text, 60)
    assert len(middle) > 2 and cut(middle[0], 60) == [middle[0]]
    assert (pack([middle[0]], tokenizer, 1000)[:-1] >= 0).all()
    for piece in (first, last):
        scored = pack([piece], tokenizer, 1000) >= 0
        assert scored.any() and not scored.all()


def test_masks_learn_from_the_cross_entropy_of_what_counts(lab: Lab) -> None:
    """However a step is cut into micro-batches, whose sequences do not have as many tokens that count."""
    shares = torch.linspace(0, 0.6, 4).repeat(16)[:, None]
    scored = torch.rand(BLOCKS.shape, generator=torch.Generator().manual_seed(0)) < shares
    model: Any = lab.gated.model
    with torch.no_grad():
        losses = F.cross_entropy(model(BLOCKS[:4]).logits[:, :-1].transpose(1, 2), BLOCKS[:4, 1:], reduction="none")
    wanted = losses[scored[:4, 1:]].mean().item()
    moved = []
    for size in (1, 4):
        recipe = lab.recipe(micro_batch_size=size)
        batches = Batches(BLOCKS, recipe, Accelerator(), scored)
        trainer = Trainer(lab.gated, batches, Run.alone(recipe), pools_of(lab.gated, recipe), Accelerator())
        assert trainer.step(0)["ce"] == pytest.approx(wanted, rel=1e-5)
        moved.append(trainer.gates.z["mlp"])
    torch.testing.assert_close(moved[0], moved[1], atol=1e-5, rtol=0)
    everything = lab.trainer()
    everything.step(0)
    assert not torch.allclose(everything.z["mlp"], moved[0], atol=1e-3)


def test_prune_learns_from_what_an_assistant_says_if_told(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)

    def chats(name: str, *roles: str) -> Path:
        rows = [{"messages": [{"role": role, "content": f"nine foxes {i} jump"} for role in roles]} for i in range(90)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    both, found = chats("both.jsonl", "user", "assistant"), []
    for source in ("all", "assistant"):
        result = prune(model, both, tmp_path / source, "--learn-from", source)
        assert result.exit_code == 0, result.output
        found.append(load_file(tmp_path / source / MASKS_FILE))
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])
    for data in (tiny_text, chats("asked.jsonl", "user")):
        told = prune(model, data, tmp_path / data.stem, "--learn-from", "assistant")
        assert told.exit_code == 0 and "no conversations are told apart" in told.output


def test_text_of_which_nothing_counts_is_refused() -> None:
    silent = torch.zeros(BLOCKS.shape, dtype=torch.bool)
    silent[:, 0] = True  # which no token predicts
    blocks = Blocks(train=BLOCKS, scored=silent, heldout=BLOCKS, found=BLOCKS.numel())
    assert counting(blocks, "all", "chats.jsonl", print) is None
    with pytest.raises(TextError, match=r"chats\.jsonl holds nothing that an assistant says"):
        counting(blocks, "assistant", "chats.jsonl", print)
