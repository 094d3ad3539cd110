"""Does the paper's table hold for a model of your own, every row at the same exact budget?

    python benchmarks/study/study.py methods MODEL --data TEXT --test wiki.test.txt --sparsity 0.2,0.5 -o DIR

DIR/TABLE.md reports the paper's finding and whether it holds for MODEL; TABLE.csv has the same numbers.
A row is a method or a file of masks, followed by settings after plus signs: paper, ours+scope=layer,
ours+steps=25%, ours+data=FILE. After +scales or +recovered, the scales of the kept units or all weights
are trained once the masks are final: wanda-sp+scales, lorap+recovered. After an interruption, or with
more rows, sparsities, seeds or tables, the same command computes only the missing cells.
"""

import sys
from pathlib import Path

from ddp_vllm.errors import DdpError
from scripts import script_parser
from tables import TABLES


def main() -> None:
    def floats(text: str) -> tuple[float, ...]:
        return tuple(map(float, text.split(",")))

    def integers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    parser = script_parser(__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("model", help="a folder or a Hub name")
    parser.add_argument("--data", help="training text, named as for prune")
    parser.add_argument("--test", type=Path, required=True, help="text file to evaluate on")
    parser.add_argument("--methods", default="", metavar="ROW,…", help="rows of the table; default: all")
    parser.add_argument("--sparsity", type=floats, default=(0.2, 0.5), help="fractions to remove")
    parser.add_argument("--seeds", type=integers, default=(0,), help="seeds of the order of the text")
    for name in ("steps", "batch-size", "seq-len"):
        parser.add_argument(f"--{name}", type=int, help="as for prune")
    parser.add_argument("--samples", type=int, default=64, help="sequences to compute scores on")
    parser.add_argument("--detokenize", action="store_true", help="undo WikiText's spacing in the test text")
    parser.add_argument("--test-length", type=int, default=512, help="tokens per window of the test text; paper: 128")
    parser.add_argument("--recipe", type=Path, help="TOML file with settings of a run")
    parser.add_argument("--output", "-o", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    from cells import run_study
    from ddp_prune.recipe import load_recipe
    from findings import write_study
    from rows import Study

    settings = {name: getattr(args, name) for name in ("model", "data", "steps", "batch_size", "seq_len")}
    settings = {name: value for name, value in settings.items() if value is not None}
    try:
        recipes = [load_recipe(args.recipe, {**settings, "sparsity": sparsity}) for sparsity in args.sparsity]
        study = Study(
            table=args.table, recipe=recipes[-1], test=args.test, sparsities=args.sparsity, seeds=args.seeds,
            methods=tuple(filter(None, args.methods.split(","))), samples=args.samples, detokenize=args.detokenize,
            test_length=args.test_length,
        )  # fmt: skip
        run_study(study, args.output, lambda line: print(line, flush=True))
        print(f"written: {write_study(args.output, args.table)}")
    except DdpError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
