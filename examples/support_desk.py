"""Prune a chat model for the traffic of a support desk, and compare ten answers with those of the
dense model.

    python examples/support_desk.py --model HuggingFaceTB/SmolLM2-135M-Instruct \\
        --data tickets.jsonl --output ./desk

tickets.jsonl has one conversation per line: `messages` with `role` and `content`, or
`conversations` with `from` and `value`. The last ten conversations with a user's turn are set
aside. No model is trained on them; both models answer their first questions.

A real run takes the default of 1,000 steps of 16 × 2,048 tokens and a GPU. To see how it works on
two CPU cores, pass --steps 60 --batch-size 1 --seq-len 1024.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ddp_vllm

NUM_QUESTIONS, ANSWER_TOKENS = 10, 64


def main(model: str, data: Path, output: Path, speedup: float | None, **settings: Any) -> None:
    # 1. Set ten conversations aside. The rest is the training text, because text like the traffic
    #    that the model will serve matters more than any other setting.
    try:
        lines = [line for line in data.read_text(encoding="utf-8").split("\n") if line]
        questions = {number: question for number, line in enumerate(lines) if (question := first_question(line))}
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(f"{data} cannot be read ({error}); give a JSONL file of conversations") from None
    if len(questions) < 2 * NUM_QUESTIONS:
        raise SystemExit(f"{data} has {len(questions)} questions of users; at least {2 * NUM_QUESTIONS} are required")
    asked = dict(list(questions.items())[-NUM_QUESTIONS:])
    training_text = output.with_name(f"{output.name}-training.jsonl")
    training_text.parent.mkdir(parents=True, exist_ok=True)
    kept = [line for number, line in enumerate(lines) if number not in asked]
    training_text.write_text("\n".join(kept) + "\n", encoding="utf-8")

    # 2. Prune. A target speedup costs less quality than a sparsity at equal speed, but it requires
    #    vLLM here, which times the model first. The cross-entropy covers only the assistant's turns.
    #    If this call is interrupted, the same call resumes it.
    budget = {"speedup": speedup} if speedup else {"sparsity": 0.2}
    pruned = ddp_vllm.prune(
        model, output=output, data=training_text, learn_from="assistant", verbose=True, **budget, **settings
    )
    quality = pruned.provenance["perplexity"]
    print(f"perplexity on held-out tickets: dense {quality['dense']:.2f}, pruned {quality['pruned']:.2f}")

    # 3. Read the answers. Perplexity does not show everything: a pruned model repeats itself
    #    sooner, for example.
    asked_texts = list(asked.values())
    answers = {name: ask(folder, asked_texts) for name, folder in (("dense", model), ("pruned", str(output)))}
    for number, question in enumerate(asked_texts):
        print(f"\n{number + 1}. {' '.join(question.split())[:200]}")
        for name, texts in answers.items():
            print(f"   {name:6}  {' '.join(texts[number].split())}")
    print(f"\nserve it: vllm serve {output}\nread more: {output / 'report.html'}")


def first_question(line: str) -> str | None:
    """Return the first message of a user in a conversation, or None if there is none."""
    row = json.loads(line)
    turns = row.get("messages") or row.get("conversations") or ()
    asked = (turn for turn in turns if turn.get("role", turn.get("from")) in ("user", "human"))
    return next((str(text) for turn in asked if (text := turn.get("content", turn.get("value")))), None)


@torch.no_grad()
def ask(folder: str, questions: list[str]) -> list[str]:
    """Return the greedy answers of a model in plain transformers; vLLM would be faster."""
    # A pruned folder has Python files of ddp-vllm, which trust_remote_code allows. Do not pass it
    # for unknown folders.
    trusted = {"trust_remote_code": (Path(folder) / "ddp_masks.safetensors").exists()}
    tokenizer = AutoTokenizer.from_pretrained(folder, **trusted)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **trusted)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    answers = []
    for question in questions:
        prompt, has_template = question, bool(tokenizer.chat_template)
        if has_template:
            turns = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=not has_template).to(model.device)
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        written = model.generate(
            ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
        answers.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hub name of the dense chat model")
    parser.add_argument("--data", type=Path, required=True, help="JSONL file of conversations")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the pruned model to")
    parser.add_argument("--speedup", type=float, help="target speedup, such as 1.25; without it, 20 %% of the units")
    for option in ("--steps", "--batch-size", "--seq-len"):
        parser.add_argument(option, type=int, default=argparse.SUPPRESS, help="as in ddp-vllm prune")
    try:
        main(**vars(parser.parse_args()))
    except ddp_vllm.DdpError as error:  # what a user can correct
        raise SystemExit(f"{parser.prog}: {error}") from None
