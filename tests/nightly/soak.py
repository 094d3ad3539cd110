"""Does a server of a pruned model answer many clients at once as it answers one, without memory growth?

Runs `vllm serve` in float32. Of ten requests five ask for a whole answer, three stream it, one disconnects during its
stream, and one is invalid. All answers are greedy and must equal, token by token, the answer to the same prompt sent
alone. The memory of all processes of the server is read after each of ten rounds.
"""

import http.client
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from ddp_benchmarks.engine import HOST, Server
from ddp_benchmarks.processes import group_members

KINDS = ("whole",) * 5 + ("stream",) * 3 + ("cut", "invalid")
NUM_PROMPTS, LONGEST = 24, 48  # tokens of the longest prompt
MAX_TOKENS, CONTEXT = 16, 256
ROUNDS = 10
OPTIONS = ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager"]
# changes to a request; the server must refuse it and serve others
INVALID: tuple[dict[str, Any], ...] = (
    {"max_tokens": -1}, {"prompt": [5] * 4 * CONTEXT}, {"prompt": [-7]}, {"prompt": [1 << 40]}, {"prompt": {"a": 1}},
    {"temperature": "warm"}, {"model": "another"}, {"n": 0},
)  # fmt: skip
VOCABULARY = 128
LAYERS = [  # of the tiny model: uneven heads, odd widths, removed blocks
    {"query_heads_per_kv_head": [3, 1], "intermediate_size": 17},
    {"query_heads_per_kv_head": [], "intermediate_size": 64},
    {"query_heads_per_kv_head": [3, 2, 1], "intermediate_size": 1},
    {"query_heads_per_kv_head": [2], "intermediate_size": 0},
]


def soak(server: Server, num_requests: int, num_clients: int) -> tuple[Counter[str], list[str], list[int]]:
    """Send requests of all kinds from many clients at once, in rounds; check each answer and the server's log.

    Return the number of correct requests by kind, a line per failure, and the server's memory in bytes after each
    round.
    """
    draw, counts, wrong, memory = random.Random(0), Counter[str](), list[str](), list[int]()
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, LONGEST))] for _ in range(NUM_PROMPTS)]
    alone = [ask(server, "whole", prompt) for prompt in prompts]
    with ThreadPoolExecutor(num_clients) as clients:
        for turn in range(ROUNDS):
            numbers = range(turn * num_requests // ROUNDS, (turn + 1) * num_requests // ROUNDS)
            chosen = [(KINDS[number % len(KINDS)], draw.randrange(NUM_PROMPTS), number) for number in numbers]
            draw.shuffle(chosen)
            answers = clients.map(lambda each: ask(server, each[0], prompts[each[1]], each[2]), chosen)
            for (kind, prompt, number), answer in zip(chosen, answers, strict=True):
                if fault := fault_of(kind, answer, alone[prompt]):
                    wrong.append(f"{kind} request {number}: {fault}")
                else:
                    counts[kind] += 1
            wrong += left_behind(server)
            memory.append(sum(map(resident_bytes, group_members(server.process.pid))))
    if num_tracebacks := server.log.read_text(errors="replace").count("Traceback"):
        wrong.append(f"{num_tracebacks} tracebacks in {server.log}")
    return counts, wrong, memory


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def ask(server: Server, kind: str, prompt: Sequence[int], number: int = 0) -> list[int] | int | str:
    """Return the tokens of an answer, the status of a refusal, or the error of the connection."""
    body: dict[str, Any] = {"model": server.model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "detokenize": False, "return_token_ids": True, "stream": kind in ("stream", "cut")}
    if kind == "invalid":
        body |= INVALID[number // len(KINDS) % len(INVALID)]
    connection = http.client.HTTPConnection(HOST, server.port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return response.status
        if not body["stream"]:
            return list(json.loads(response.read())["choices"][0]["token_ids"])
        tokens: list[int] = []
        for line in response:
            if line.startswith(b"data: {"):
                tokens += json.loads(line[len(b"data: ") :])["choices"][0]["token_ids"]
                if kind == "cut":
                    break  # disconnect
        return tokens
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def fault_of(kind: str, answer: list[int] | int | str, alone: list[int] | int | str) -> str | None:
    """Return how an answer is wrong, or None."""
    if kind == "invalid":
        return None if isinstance(answer, int) and 400 <= answer < 500 else f"not refused, but {answer}"
    if not isinstance(answer, list) or not isinstance(alone, list):
        return f"no answer, but {answer}; alone {alone}"
    expected = alone[: len(answer)] if kind == "cut" else alone
    return None if answer and answer == expected else f"{answer}, and alone {alone}"


def left_behind(server: Server) -> list[str]:
    """Return the work that the server still has 10 seconds after all clients disconnected."""
    deadline, busy = time.monotonic() + 10, ["?"]
    while busy and time.monotonic() < deadline:
        time.sleep(0.1)
        with closing(http.client.HTTPConnection(HOST, server.port, timeout=120)) as connection:
            connection.request("GET", "/metrics")
            gauges = connection.getresponse().read().decode()
        found = re.findall(r"^vllm:(num_requests_\w+|kv_cache_usage_perc)\{[^}]*\} (\S+)$", gauges, re.MULTILINE)
        busy = [f"{name} is {value} with no client left" for name, value in found if float(value)]
    return busy


def tiny_model(folder: Path) -> Path:
    """Write a random, unevenly pruned model and a tokenizer; without one, unknown tokens end vLLM's engine."""
    from tiny_models import save_pruned
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"word{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="word0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    save_pruned(folder, "Llama", LAYERS, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    return folder
