"""Does another value of a constant of the training core give a better model?

    python benchmarks/lab/variants.py NAME --data FOLDER --set ddp_prune.core.budget.CLOSED_BY=1.0 --
    MODEL --speedup 1.25 --steps 60 ...

NAME is the name of the cell. Everything after `--` goes to `ddp-vllm prune`; FOLDER has the texts
that `reference.py --prepare` wrote. The constants are set before the run starts, which the product
does not offer. The pruned model is evaluated on texts that it was not trained on, and
benchmarks/results/variants/NAME.json keeps perplexity, KL divergence and top-1 agreement with the
dense model. A cell that exists is not computed again, and a run that was killed resumes.
"""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

from ddp_benchmarks.protocol import script_parser, split_command_line
from ddp_vllm.cli import main as command_line
from ddp_vllm.machine import hardware, today, versions

RESULTS = Path(__file__).parents[1] / "results" / "variants"
TEXTS = "wikitext2.txt,c4.jsonl,python.txt,chats-heldout.jsonl"
EVALUATION = "--max-length 512 --tokens 4096 --quiet"


def run(*words: str) -> None:
    """Run a command of ddp-vllm in this process, where the constants are set."""
    try:
        command_line(list(words))
    except SystemExit as exit:
        if exit.code:
            raise


def main() -> None:
    own_words, words = split_command_line()
    parser = script_parser(__doc__)
    parser.add_argument("name")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="MODULE.NAME=VALUE")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "variants")
    arguments = parser.parse_args(own_words)
    file = RESULTS / f"{arguments.name}.json"
    if file.exists():
        return
    for assignment in arguments.set:
        name, _, value = assignment.partition("=")
        module, _, constant = name.rpartition(".")
        getattr(importlib.import_module(module), constant)  # a misspelled one is an error
        setattr(sys.modules[module], constant, json.loads(value))
    os.chdir(arguments.data)
    pruned, evaluated = (arguments.work / arguments.name / kind for kind in ("pruned", "eval"))
    if not (pruned / "config.json").exists():
        run("prune", *words, "-o", str(pruned))
    run("eval", str(pruned), "--against", words[0], "--text", TEXTS, *EVALUATION.split(), "-o", str(evaluated))
    *_, newest = sorted(evaluated.glob("text*.json"))
    result = {
        "prune": [Path(word).name if "/" in word else word for word in words],
        "set": arguments.set,
        "versions": versions(),
        "hardware": hardware(),
        "date": today(),
        "texts": json.loads(newest.read_text(encoding="utf-8"))["texts"],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
