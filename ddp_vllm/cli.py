"""The `ddp-vllm` command. It imports the module of a command when it is used, and turns errors into
one line.

Neither this module nor one that defines commands (`api.COMMANDS`) imports torch, transformers or
vLLM before a command runs.
"""

import difflib
import importlib
import importlib.metadata
import logging
import os
import re
from contextlib import suppress
from typing import Any

import click

from ddp_vllm import __version__
from ddp_vllm.api import COMMANDS
from ddp_vllm.command import command_of
from ddp_vllm.errors import DdpError, SettingError, TrainingError, echo, forgive_streams, printable


def remedy(package: str) -> str:
    """Return the pip command that installs a package: by the extra of ddp-vllm that requires it, if
    there is one."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("ddp-vllm") or ():
            name, extra = re.match(r"([\w.-]+)(?:.*extra == .(\w+))?", requirement).groups()  # type: ignore[union-attr]
            if extra and name == package:
                return f'pip install ".[{extra}]" in a clone of ddp-vllm'
    return f"pip install {package}"


LONGEST_LINE = 1200  # characters of a message, some of which quote files or other libraries
INTERRUPTED = 130  # the exit code of shells after Ctrl-C


def _one_line(text: str) -> str:
    """Return a message as one printable line, shortened in the middle if it is long."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE * 2 // 3]} … {line[-LONGEST_LINE // 3 :]}"


def quiet_libraries() -> None:
    """Keep libraries from logging, when they are imported, what no user can act on."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


class _Lazy(click.Group):
    """A group whose commands are imported when they are used."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        forgive_streams()
        return super().main(*args, **kwargs)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)}"
            raise SettingError(f"there is no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, text = COMMANDS[cmd_name]
        importlib.import_module(module)
        return command_of(cmd_name, text)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DdpError as error:
            if ctx.params["debug"]:
                raise
            rank = os.environ.get("LOCAL_RANK", "0")
            # the first process prints errors for all, but any process may run out of memory alone
            if rank == "0" or isinstance(error, TrainingError):
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
        except (
            OSError,
            UnicodeError,
            RecursionError,
        ) as error:  # from a file or a name; all other errors are bugs of ours
            if ctx.params["debug"]:
                raise
            reason = _one_line(str(error)) or type(error).__name__
            echo(f"ddp-vllm: {reason}; --debug shows the traceback", err=True)
            ctx.exit(DdpError.exit_code)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ddp-vllm")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Prune a language model by learned masks and serve the smaller model with vLLM.

    \b
    ddp-vllm prune HuggingFaceTB/SmolLM2-135M --sparsity 0.2 -o ./pruned
    vllm serve ./pruned

    Exit codes: 0 done, 1 other, 2 setting, 3 model, 4 text, 5 output, 6 training, 7 checkpoint, 8
    serving, 9 limit, 130 Ctrl-C.
    """
    quiet_libraries()
