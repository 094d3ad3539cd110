"""Does a pruned code model still write Python that compiles?

    python benchmarks/lab/completions.py MODEL --pruned DIR,DIR [--prompts 40]

Each model goes on greedily from the signature and docstring of functions of Python's own standard library. It counts if
the function that it wrote, up to the first line that is not indented, has a body and compiles. The functions are the
first of each module that has one, in the order of the alphabet: nobody picked them. A prompt ends with the line break
after the docstring, as those of HumanEval do. The last line on stdout is JSON.
"""

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ddp_benchmarks.protocol import script_parser
from ddp_models.evaluation import generate
from ddp_models.loading import load_model
from ddp_models.source import open_pruned, open_source
from ddp_text.tokens import load_tokenizer
from ddp_vllm.checkpoint import read_checkpoint
from study import print_result

LONGEST, BATCH = 128, 8  # tokens of a completion, completions at once


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--pruned", required=True, help="Pruned folders, separated by commas.")
    parser.add_argument("--prompts", type=int, default=40)
    arguments = parser.parse_args()
    source, tokenizer = open_source(arguments.model), load_tokenizer(arguments.model)
    folders = [Path(name) for name in arguments.pruned.split(",")]
    prompts = list(prompts_of(Path(sysconfig.get_paths()["stdlib"]), arguments.prompts))
    found = {}
    pruned = [(folder.name, open_pruned(read_checkpoint(folder), source)) for folder in folders]
    for name, opened in [("dense", source), *pruned]:
        model, answers = load_model(opened, "auto"), []
        for start in range(0, len(prompts), BATCH):
            answers += generate(model, tokenizer, prompts[start : start + BATCH], LONGEST)
        compiles = [is_whole(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        found[name] = {"compile": sum(compiles), "of": len(prompts), "first": answers[0]}
        print(json.dumps({name: found[name]}), flush=True)
    print_result(__doc__, arguments, models=found)


def prompts_of(library: Path, number: int) -> Iterator[str]:
    """Yield the head of the first function of each module that has a docstring and no decorator."""
    for path in sorted(library.glob("*.py")):
        if number == 0:
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and not node.decorator_list:
                head = text.splitlines()[node.lineno - 1 : node.body[0].end_lineno]
                if len(head) < 20 and len(node.body) > 1:
                    yield "\n".join(head) + "\n"
                    number -= 1
                    break


def is_whole(prompt: str, answer: str) -> bool:
    """Tell whether the function that was begun is there: its lines up to the first that is not indented."""
    lines = answer.split("\n")
    end = next((place for place, line in enumerate(lines) if line and not line.startswith((" ", "\t", ")"))), None)
    body = lines if end is None else lines[:end]
    if not any(line.strip() for line in body):
        return False
    try:
        compile(prompt + "\n".join(body) + "\n", "completion", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


if __name__ == "__main__":
    main()
