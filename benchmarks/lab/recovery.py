"""How much of what pruning lost does recovery give back, by method and by the minute?

    python benchmarks/lab/recovery.py MODEL --pruned DIR,DIR --data TEXT --tests WIKITEXT,C4,CHAT --detokenize \\
        --methods full,lora --minutes 10,60 -o FOLDER

Each pruned folder is recovered from MODEL by the verb that users run, each method for each number of minutes, one after
the other; nothing heavy may run beside it. Folders may be of other sparsities, seeds, lengths of search, or be cut by
one-shot masks (`ddp-vllm study methods`, then `ddp-vllm apply`). Every test text, which nothing may learn on, is judged
by its first 16×512 tokens. `back` is the share of the lost log-perplexity that is given back, `mean` that over the
texts. A cell that is in FOLDER is not done again. The last line on stdout is JSON.
"""

import itertools
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ddp_benchmarks.protocol import script_parser
from ddp_models.loading import load_model
from ddp_models.source import open_pruned, open_source
from ddp_study.study import TEST_BLOCKS, TEST_LENGTH
from ddp_text.conversations import Notes
from ddp_text.documents import Document, read_documents
from ddp_text.rows import open_rows
from ddp_text.templates import ChatTemplate
from ddp_text.tokens import load_tokenizer, pack
from ddp_training.loss import losses
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.manifest import sha256
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.output import write_text
from study import print_result

TEXT_LENGTH = 4 * TEST_LENGTH  # characters of a row at most, so that many rows are read


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--pruned", required=True, help="Pruned folders, separated by commas.")
    parser.add_argument("--data", required=True, help="Text to recover on.")
    parser.add_argument("--tests", required=True, help="Texts to judge by, separated by commas: .txt, .raw or .jsonl.")
    parser.add_argument("--detokenize", action="store_true", help="Undo WikiText's spacing in .raw, as lm-eval does.")
    parser.add_argument("--methods", default="full,lora")
    parser.add_argument("--minutes", default="10")
    parser.add_argument("--set", action="append", default=[], help="Option of recover: --set learning-rate=1e-4")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    judge = Judge(arguments.model, arguments.tests.split(","), arguments.detokenize, arguments.output)
    cells = []
    ways = itertools.product(arguments.pruned.split(","), arguments.methods.split(","), arguments.minutes.split(","))
    for folder, method, minutes in ways:
        name = "-".join([Path(folder).name, method, minutes, *(item.replace("=", "") for item in arguments.set)])
        recovered = arguments.output / name
        if not recovered.is_dir():
            command = ["recover", folder, "--teacher", arguments.model, "--data", arguments.data, "--method", method]
            more = [word for item in arguments.set for word in (f"--{item.partition('=')[0]}", item.partition("=")[2])]
            command += ["--minutes", minutes, "-o", str(recovered), *more]
            subprocess.run([sys.executable, "-m", "ddp_vllm", *command], check=True, stdout=sys.stderr)
        cells.append(judge.cell(name, Path(folder), recovered))
        print(json.dumps(cells[-1]), flush=True)
    print_result(__doc__, arguments, cells=cells)


class Judge:
    """Reads test texts with models, each folder once."""

    def __init__(self, model: str, tests: list[str], detokenize: bool, output: Path) -> None:
        self.model, self.source, self.output = model, open_source(model), output
        self.texts = {Path(test).name: _read(Path(test), load_tokenizer(model), detokenize) for test in tests}

    def cell(self, name: str, pruned: Path, recovered: Path) -> dict[str, Any]:
        """Return perplexities and what was given back."""
        dense, before, after = (self.losses(folder) for folder in (None, pruned, recovered))
        back = {text: (before[text] - after[text]) / (before[text] - dense[text]) for text in self.texts}
        perplexity = {
            text: [round(math.exp(model[text]), 2) for model in (dense, before, after)] for text in self.texts
        }
        seconds = read_checkpoint(recovered).provenance["recovery"]["seconds"]
        mean = statistics.fmean(back.values())
        return {"cell": name, "seconds": seconds, "dense, pruned, recovered": perplexity, "back": back, "mean": mean}

    def losses(self, folder: Path | None) -> dict[str, float]:
        """Return the mean loss of each text by a pruned model, or by the dense one; kept beside the results."""
        mark = f"{folder.resolve().name}-{sha256(folder / MASKS_FILE)[:8]}" if folder else "dense"
        kept = self.output / f"{mark}.losses.json"
        found: dict[str, float] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        if found.keys() != self.texts.keys():
            source = open_pruned(read_checkpoint(folder), self.source) if folder else self.source
            model = load_model(source, "auto")
            found = {name: statistics.fmean(losses(model, blocks)) for name, blocks in self.texts.items()}
            write_text(json.dumps(found), kept)
        return found


def _read(path: Path, tokenizer: Any, detokenize: bool) -> torch.Tensor:
    """Return the first tokens of a text, int64 [TEST_BLOCKS, TEST_LENGTH]; of many documents, the beginning of each."""
    wanted = TEST_BLOCKS * TEST_LENGTH
    if path.suffix == ".raw" and detokenize:
        from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

        texts = [Document(wikitext_detokenizer({"page": path.read_text(encoding="utf-8")}))]
    else:
        rows = list(read_documents(open_rows(str(path)), ChatTemplate(tokenizer), Notes()))
        texts = [text[:TEXT_LENGTH] for text in rows] if len(rows) > 1 else rows
    return torch.from_numpy(pack(texts, tokenizer, wanted).ids).long().view(TEST_BLOCKS, TEST_LENGTH)


if __name__ == "__main__":
    main()
