"""How much faster is a pruned model in stock llama.cpp, and does it say there what it says in transformers?

    python benchmarks/lab/llama_cpp.py MODEL --pruned DIR,DIR --test FILE [--types F16,Q8_0] [--rounds 5] [--threads 2]

Every model is exported in every type, and each file has a server of its own, with llama.cpp's defaults. In a round each
server reads a prompt and goes on from it, one after the other; before the first round each does so once unmeasured.
Reported are the ratios of tokens/s to the dense file of the same type, paired within rounds, with their 95 % interval.
Beside them is the ideal, by how much fewer bytes of weights a token needs. Perplexity is over the first tokens of the
test text, of which only ASCII is read: the server tells no probability of half a character. The last line on stdout is
JSON.
"""

import argparse
import json
import math
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import torch
import xllamacpp
from transformers import AutoModelForCausalLM

from ddp_benchmarks.protocol import rotated, script_parser
from ddp_text.tokens import load_tokenizer
from ddp_vllm.checkpoint import read_config
from ddp_vllm.families import register_pruned
from ddp_vllm.gguf.file import write_gguf
from ddp_vllm.results import judge, ratio_text, spread
from study import print_result

PHASES = {"prefill": "prompt_per_second", "decode": "predicted_per_second"}  # what llama.cpp calls tokens/s of each


class Server:
    """llama.cpp's server over one file, in this process."""

    def __init__(self, file: Path, *, threads: int, context: int = 1024, **settings: Any) -> None:
        params = xllamacpp.CommonParams()
        params.model.path, params.port, params.n_ctx, params.n_parallel = str(file), 0, context, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        for name, value in settings.items():
            setattr(params, name, value)
        self._server = xllamacpp.Server(params)

    def ask(self, path: str, **body: Any) -> Any:
        """Return the answer to a request. The API is that of `llama-server`."""
        url, headers = self._server.listening_address + path, {"Content-Type": "application/json"}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy leads here
        with opener.open(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            return json.load(answer)

    def speeds(self, prompt: list[int], num_tokens: int) -> dict[str, float]:
        """Return tokens/s of reading a prompt and of going on from it, without the cost of a sampler."""
        settings = {"cache_prompt": False, "ignore_eos": True, "samplers": ["top_k"], "top_k": 1}
        timings = self.ask("/completion", prompt=prompt, n_predict=num_tokens, **settings)["timings"]
        return {phase: timings[name] for phase, name in PHASES.items()}

    def logprob(self, prompt: list[int], token: int) -> float:
        """Return the log-probability of a token after a prompt: a bias, which it does not contain, has it chosen."""
        settings = {"n_predict": 1, "n_probs": 1, "logit_bias": [[token, 1e4]], "cache_prompt": True}
        chosen = self.ask("/completion", prompt=prompt, **settings)["completion_probabilities"][0]
        assert chosen["id"] == token
        return float(chosen["logprob"])

    def perplexity(self, ids: list[int]) -> float:
        """Return the perplexity of all tokens but the first."""
        found = [self.logprob(ids[:end], ids[end]) for end in range(1, len(ids))]
        return math.exp(-sum(found) / len(found))


def weight_bytes(file: Path) -> int:
    """Return the bytes of weights that a token needs: all, but for embeddings with a separate output only a row."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)


@torch.no_grad()
def perplexity_in_transformers(folder: Path, ids: list[int]) -> float:
    register_pruned(read_config(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32).eval()
    tokens = torch.tensor([ids])
    return math.exp(model(tokens, labels=tokens).loss.item())


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("model", type=Path, help="folder of the dense model")
    parser.add_argument("--pruned", required=True, help="Pruned folders, separated by commas.")
    parser.add_argument("--test", type=Path, required=True, help="Text for perplexity.")
    parser.add_argument("--types", default="F16,Q8_0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--test-tokens", type=int, default=512)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as files:
        print_result(__doc__, arguments, threads=arguments.threads, **measure(arguments, Path(files)))


def measure(arguments: argparse.Namespace, files: Path) -> dict[str, Any]:
    """Return sizes, perplexities and speeds of every file, and the verdicts on the pruned ones."""
    folders = {"dense": arguments.model, **{Path(name).name: Path(name) for name in arguments.pruned.split(",")}}
    text = arguments.test.read_text(encoding="utf-8").encode("ascii", "ignore").decode()
    ids = load_tokenizer(str(arguments.model))(text, verbose=False)["input_ids"]
    test, prompt = ids[: arguments.test_tokens], ids[: arguments.prompt_tokens]
    torch.set_num_threads(arguments.threads)
    expected = {label: perplexity_in_transformers(folder, test) for label, folder in folders.items()}
    found, servers = {}, {}
    for kind in arguments.types.split(","):
        for label, folder in folders.items():
            file = files / f"{label}-{kind}.gguf"
            write_gguf(folder, file, kind)
            server = servers[label, kind] = Server(file, threads=arguments.threads)
            server.speeds(prompt, arguments.new_tokens)
            found[label, kind] = {
                "label": label, "type": kind, "file_bytes": file.stat().st_size, "weight_bytes": weight_bytes(file),
                "perplexity": server.perplexity(test), "perplexity_in_transformers": expected[label], "rounds": [],
            }  # fmt: skip
    for turn in range(arguments.rounds):
        for key in rotated(list(servers), turn):
            found[key]["rounds"].append(servers[key].speeds(prompt, arguments.new_tokens))
    for row in found.values():
        print(line(row), flush=True)
    verdicts = [
        verdict(found["dense", kind], row, phase)
        for (label, kind), row in found.items()
        if label != "dense"
        for phase in PHASES
    ]
    for answer in verdicts:
        ideal = f"ideal {answer['ideal']:.2f}×" if answer["phase"] == "decode" else ""
        print(f"{answer['label']:12s} {answer['type']:5s} {answer['phase']:8s} {ratio_text(answer)}  {ideal}")
    return {"files": list(found.values()), "verdicts": verdicts}


def line(row: dict[str, Any]) -> str:
    """Write what was found of one file."""
    medians = [f"{phase} {spread([one[phase] for one in row['rounds']])['median']:.1f}" for phase in PHASES]
    return (
        f"{row['label']:12s} {row['type']:5s} {row['file_bytes'] / 1e6:7.1f} MB  perplexity {row['perplexity']:.3f} "
        f"(transformers {row['perplexity_in_transformers']:.3f})  {', '.join(medians)} tokens/s"
    )


def verdict(dense: dict[str, Any], pruned: dict[str, Any], phase: str) -> dict[str, Any]:
    """Compare the speeds of two files of one type."""
    ratio = judge(*([one[phase] for one in row["rounds"]] for row in (dense, pruned))).to_json()
    ideal = dense["weight_bytes"] / pruned["weight_bytes"]
    return {"label": pruned["label"], "type": pruned["type"], "phase": phase, "ideal": ideal} | ratio


if __name__ == "__main__":
    main()
