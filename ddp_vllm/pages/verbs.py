"""The verbs of a written checkpoint: read, inspect, report, compare, push and export.

Libraries that draw, and the package gguf, are imported when they are called.
"""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.errors import CheckpointError, LimitError, OutputError, SettingError, echo, line_printer
from ddp_vllm.families import check_present, code_of
from ddp_vllm.model_facts import FOUND_BY_NAME
from ddp_vllm.model_files import WEIGHT_PATTERNS
from ddp_vllm.output import check_file, write_text
from ddp_vllm.pages.page import REPORT_FILE
from ddp_vllm.pages.summary import MIN_AGREEMENT
from ddp_vllm.remote_code.files import WidthsError, weight_files
from ddp_vllm.remote_code.widths import states_widths
from ddp_vllm.settings import Option, Values, command, typed

if TYPE_CHECKING:
    from ddp_vllm.pages.measurements import Comparison

CARD = "README.md"
PUBLISHED = (*FOUND_BY_NAME, "ddp_*", REPORT_FILE, "*processor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")
"""What is sent besides weights and code, because results of bench and eval name folders of this machine."""


@typed()
def read(folder: str | Path) -> Checkpoint:
    """Read and check a pruned checkpoint without loading a weight: widths, number of parameters,
    provenance."""
    return read_checkpoint(Path(folder))


def _print_checkpoint(_: Any, values: Values) -> None:
    from ddp_vllm.pages.terminal import SafeConsole, print_checkpoint

    if not values["as_json"]:
        print_checkpoint(read(values["folder"]), SafeConsole())


@command("inspect", show=_print_checkpoint, as_json=lambda facts, _: facts)
def inspect(folder: str | Path) -> dict[str, Any]:
    """Check a pruned checkpoint and show its widths, sizes, quality and recipe.

    In Python the result is what `ddp-vllm inspect --json` prints.
    """
    from ddp_vllm.pages.summary import summary

    checkpoint = read(folder)
    if states_widths(checkpoint.config):
        try:
            check_present(checkpoint.folder, checkpoint.config, checkpoint.widths, checkpoint.shapes)
        except WidthsError as error:
            raise CheckpointError(f"{folder}: {error}") from None
    return summary(checkpoint)


@command("report", show=lambda page, _: echo(f"written: {page}"))
def report(
    folder: str | Path,
    *,
    output: Annotated[Path | str | None, Option("Page or folder.", "-o", shown="FOLDER itself")] = None,
) -> Path:
    """Draw the removed units of a pruned checkpoint as one page, report.html.

    `prune` draws this page too.
    """
    from ddp_vllm.pages.report import write_report

    return write_report(read(folder), Path(output or folder))


def _print_comparison(comparison: "Comparison", values: Values) -> None:
    """Raises: LimitError if no model is within the tolerance."""
    from ddp_vllm.pages.compare import choice, comparison_table
    from ddp_vllm.pages.terminal import SafeConsole, print_table

    if not values["as_json"]:
        print_table(comparison_table(comparison), SafeConsole())
    tolerance, page = values["tolerance"], values["output"]
    for note in comparison.notes:
        echo(note, err=True)
    echo(f"{page.with_suffix('.html')} and {page.with_suffix('.md')}")
    if tolerance is not None:
        best, sentence = choice(comparison, tolerance, values["min_agreement"])
        echo(f"within {tolerance:g} times: {sentence}")
        if best is None:
            raise LimitError(sentence)


def _records(comparison: "Comparison", values: Values) -> dict[str, Any]:
    """Return the facts of each model, its two ratios with intervals, and the choice."""
    from ddp_vllm.pages.compare import choice

    tolerance, least = values["tolerance"], values["min_agreement"]
    best = None if tolerance is None else choice(comparison, tolerance, least)[0]
    models = [
        {"facts": model.facts.to_json(), "heldout_ratio": model.heldout, "speedup": model.speedup}
        for model in comparison.pruned
    ]
    return {"models": models, "chosen": best.name if best else None, "notes": comparison.notes}


@command("compare", show=_print_comparison, as_json=_records)
def compare(
    folders: Iterable[str | Path],
    *,
    output: Annotated[Path | str, Option("The page.", "-o")] = "compare.html",
    results: Annotated[
        Iterable[Path | str], Option("Results files outside the folders, or folders that eval -o wrote.")
    ] = (),
    dense: Annotated[str | Path | None, Option("The dense model.", metavar="MODEL", shown="that of the recipe")] = None,
    tolerance: Annotated[
        float | None,
        Option("Name the fastest model whose perplexity is at most this many times the dense model's.", least=0.01),
    ] = None,
    min_agreement: Annotated[float | None, MIN_AGREEMENT] = None,
    overwrite: Annotated[bool, Option("Replace the page.")] = False,
) -> "Comparison":
    """Put quality and speed of the pruned and trimmed models in FOLDERS into one table, here and on a
    page in HTML and Markdown.

        ddp-vllm compare ./pruned-20 ./pruned-50 -o page.html

    Results of bench and eval are found in each folder and its eval folder, or passed with
    --results. The exit code is 9 if no model is within --tolerance.
    """
    from ddp_vllm.pages.compare import page_of
    from ddp_vllm.pages.measurements import collect
    from ddp_vllm.pages.page import HTML, MARKDOWN, to_html, to_markdown

    if not (folders := [*map(Path, folders)]):
        raise SettingError("folders", "names no pruned or trimmed model; give one or several")
    if min_agreement is not None and tolerance is None:
        raise SettingError("min_agreement", "has no effect without a tolerance; omit it, or pass one")
    if Path(output).suffix not in ("", ".html", ".md"):
        raise SettingError("output", f"is {output}; the page is written as .html and .md, so give a name with .html")
    page, markdown = (Path(output).with_suffix(suffix) for suffix in (".html", ".md"))
    for path, begins in ((page, HTML), (markdown, MARKDOWN)):
        check_file(path, overwrite=overwrite, begins=begins)

    comparison = collect(folders, results=[*map(Path, results)], dense=str(dense) if dense else None)
    content = page_of(comparison, tolerance, min_agreement)
    write_text(MARKDOWN + to_markdown(content), markdown)
    write_text(to_html(content), page)
    return comparison


@command("push", show=lambda address, _: echo(f"published: {address}"))
def push(
    folder: str | Path,
    repository: str,
    *,
    private: Annotated[bool, Option("Make a new repository private.")] = False,
    revision: Annotated[str | None, Option("Branch to push to; a new one is made.", shown="main")] = None,
    license: Annotated[
        str | None, Option("License of the dense model in the hub's spelling, such as apache-2.0.")
    ] = None,
    base_model: Annotated[str | None, Option("The dense model on the hub.", shown="that of the recipe")] = None,
) -> str:
    """Publish a pruned checkpoint on the Hugging Face hub, as OWNER/NAME.

        ddp-vllm push ./pruned me/llama-pruned --license apache-2.0

    The folder is checked first. Only the model's own files and licenses are sent, and a card for the
    hub. They replace those of a model that was published there before. Log in first with `hf auth
    login`, or set HF_TOKEN.

    In Python the address of the commit is returned.
    Raises: CheckpointError if the folder is damaged; OutputError if publishing fails.
    """
    from huggingface_hub import HfApi

    from ddp_vllm.pages.card import model_card

    checkpoint, api, place = read(folder), HfApi(library_name="ddp-vllm"), Path(folder)
    files = [path for pattern in PUBLISHED for path in place.glob(pattern) if path.is_file()]
    files += [*weight_files(place), *(place / code.name for code in code_of(checkpoint.config))]
    names = sorted({path.relative_to(place).as_posix() for path in files})
    message = f"{checkpoint.config['model_type']} pruned by ddp-vllm"
    branch: dict[str, Any] = {"revision": revision, "commit_message": message}
    try:
        name = api.create_repo(repository, private=private, exist_ok=True).repo_id
        if revision:  # a commit does not make its branch
            api.create_branch(name, branch=revision, exist_ok=True)
        card = model_card(checkpoint, name.partition("/")[2], name, license_name=license, base_model=base_model)
        there = api.list_repo_files(name, revision=revision)
        earlier = [*filter(_is_of_model, there)]  # of one that was published there before
        api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=names, delete_patterns=earlier, **branch)
        return api.upload_file(repo_id=name, path_or_fileobj=card.encode(), path_in_repo=CARD, **branch)
    except Exception as error:  # errors of the hub, of the network and of three libraries
        reason = " ".join(str(error).split())[:300]
        raise OutputError(f"{repository} was not published ({type(error).__name__}: {reason})") from error


def _is_of_model(file: str) -> bool:
    """Tell whether a file of a repository would be read with the model in its top folder."""
    patterns = (pattern for pattern in (*FOUND_BY_NAME, "ddp_*", *WEIGHT_PATTERNS) if fnmatch(file, pattern))
    return any(pattern.count("/") == file.count("/") for pattern in patterns)


@command("export", show=lambda file, _: echo(f"written: {file} ({file.stat().st_size / 1e6:,.0f} MB)"))
def export(
    folder: str | Path,
    *,
    output: Annotated[Path | str, Option("The file to write.", "-o")],
    outtype: Annotated[str, Option("f32, f16, bf16 or q8_0.")] = "f16",
    overwrite: Annotated[bool, Option("Replace the file.")] = False,
    verbose: bool = False,
) -> Path:
    """Write the pruned or dense model in FOLDER as one GGUF file that stock llama.cpp runs.

        ddp-vllm export ./pruned --outtype q8_0 -o pruned.gguf
        llama-server -m pruned.gguf

    In Python the path of the file is returned. verbose: print which tensors were zero-padded.
    """
    from ddp_vllm.gguf.file import write_gguf

    for note in write_gguf(Path(folder), Path(output), outtype.upper(), overwrite=overwrite):
        line_printer(verbose)(note)
    return Path(output)
