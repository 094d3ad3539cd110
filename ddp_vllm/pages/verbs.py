"""The verbs of a written checkpoint as functions: read, inspect, report, compare, push and export.

Libraries that draw, and the package gguf, are imported when they are called.
"""

from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.errors import OutputError, SettingError, line_printer
from ddp_vllm.output import check_file

if TYPE_CHECKING:
    from ddp_vllm.pages.measurements import Comparison

CARD = "README.md"
RESULTS = ("eval/*", "sharegpt-*")  # of eval and bench, which name folders of this machine


def read(folder: str | Path) -> Checkpoint:
    """Read and check a pruned checkpoint without loading a weight: widths, number of parameters,
    provenance."""
    return read_checkpoint(Path(folder))


def inspect(folder: str | Path) -> dict[str, Any]:
    """Return widths, sizes, quality and recipe of a pruned checkpoint, as `ddp-vllm inspect --json`
    prints them."""
    from ddp_vllm.pages.summary import summary

    return summary(read(folder))


def report(folder: str | Path, *, output: str | Path | None = None) -> Path:
    """Draw the removed units of a pruned checkpoint, and return the path of `report.html`.

    output: another folder for the page.
    """
    from ddp_vllm.pages.report import write_report

    return write_report(read(folder), Path(output or folder))


def compare(
    folders: Iterable[str | Path],
    *,
    output: str | Path = "compare.html",
    results: Iterable[str | Path] = (),
    dense: str | Path | None = None,
    tolerance: float | None = None,
    overwrite: bool = False,
) -> "Comparison":
    """Put quality and speed of pruned checkpoints on one page, in HTML and in a Markdown file next
    to it.

    results: files of `bench` and `evaluate` outside the folders, or folders of them. dense: the
    dense model, by default that of the recipe. tolerance: name the fastest model whose perplexity
    is at most this many times the dense model's. Returns the `Comparison`.
    """
    if tolerance is not None and not 0 < tolerance < inf:
        raise SettingError(f"--tolerance {tolerance:g} is not a factor; give a number above 0, such as 1.05")
    page = Path(output)
    markdown = page.with_suffix(".md")
    if markdown == page:
        raise SettingError(f"{page} is the name of the Markdown file; call the page {page.with_suffix('.html')}")
    for path in (page, markdown):
        check_file(path, overwrite=overwrite)
    from ddp_vllm.pages.compare import write_comparison
    from ddp_vllm.pages.measurements import collect

    comparison = collect([*map(Path, folders)], results=[*map(Path, results)], dense=str(dense) if dense else None)
    write_comparison(comparison, page, markdown, tolerance)
    return comparison


def push(
    folder: str | Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    license_name: str | None = None,
    base_model: str | None = None,
) -> str:
    """Publish a pruned checkpoint on the Hugging Face hub and return the address of the commit.

    repository: OWNER/NAME. license_name: of the dense model, in the hub's spelling. base_model: the
    dense model on the hub, by default the one it was pruned from. revision: a branch, which is made
    if it is new. Results of `evaluate` and `bench` are not sent.
    Raises: CheckpointError if the folder is damaged; OutputError if publishing fails.
    """
    from huggingface_hub import HfApi

    from ddp_vllm.pages.card import model_card

    checkpoint, api = read(folder), HfApi(library_name="ddp-vllm")
    message = f"{checkpoint.config['model_type']} pruned by ddp-vllm"
    branch: dict[str, Any] = {"revision": revision, "commit_message": message}
    try:
        name = api.create_repo(repository, private=private, exist_ok=True).repo_id
        if revision:  # a commit does not make its branch
            api.create_branch(name, branch=revision, exist_ok=True)
        card = model_card(checkpoint, name.partition("/")[2], name, license_name=license_name, base_model=base_model)
        api.upload_folder(repo_id=name, folder_path=folder, ignore_patterns=[CARD, *RESULTS], **branch)
        return api.upload_file(repo_id=name, path_or_fileobj=card.encode(), path_in_repo=CARD, **branch)
    except Exception as error:  # errors of the hub, of the network and of three libraries
        reason = " ".join(str(error).split())[:300]
        raise OutputError(f"{repository} was not published ({type(error).__name__}: {reason})") from error


def export(
    folder: str | Path, *, output: str | Path, outtype: str = "f16", overwrite: bool = False, verbose: bool = False
) -> Path:
    """Write a pruned or dense model as one GGUF file for stock llama.cpp, and return its path.

    outtype: f32, f16, bf16 or q8_0. verbose: print which tensors were zero-padded.
    """
    from ddp_vllm.gguf.file import write_gguf

    for note in write_gguf(Path(folder), Path(output), outtype.upper(), overwrite=overwrite):
        line_printer(verbose)(note)
    return Path(output)
