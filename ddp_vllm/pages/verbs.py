"""The verbs of a written checkpoint as functions: inspect, report, compare and push.

Libraries that draw are imported when they are called.
"""

import re
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_vllm.errors import OutputError, SettingError
from ddp_vllm.folder import read
from ddp_vllm.manifest import CARD, MANIFEST, PICTURE_FOLDER, REPORT_FILE, check_manifest
from ddp_vllm.output import check_file

if TYPE_CHECKING:
    from ddp_vllm.pages.measurements import Comparison

_PART = r"\w[\w.-]{0,95}(?<![.-])"
# as the hub's client checks
REPOSITORY = re.compile(rf"(?!.*(--|\.\.|\.git$)){_PART}/{_PART}", re.ASCII)


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
    dry_run: bool = False,
) -> dict[str, int]:
    """Publish a pruned checkpoint on the Hugging Face hub and return the bytes of each file by its
    name.

    repository: OWNER/NAME. license_name: of the dense model, in the hub's spelling. base_model: the
    dense model on the hub, by default the one it was pruned from. revision: a branch, which is made
    if it is new. dry_run: only return what would be published.
    Raises: CheckpointError if the folder has changed since it was written; SettingError for a name
        that the hub refuses; OutputError if publishing fails.
    """
    from huggingface_hub import HfApi

    from ddp_vllm.pages.card import model_card

    if not REPOSITORY.fullmatch(repository):
        raise SettingError(
            f"{repository} is not a repository name; give OWNER/NAME of letters, digits, '_', '-' and '.', each "
            "beginning and ending with a letter, digit or '_', without '--', '..' or a final '.git'"
        )
    folder = Path(folder)
    names, checkpoint = [*check_manifest(folder), MANIFEST], read(folder)
    pictures = [f"{PICTURE_FOLDER}/{path.name}" for path in (folder / PICTURE_FOLDER).glob("*.png")]
    names += [name for name in (REPORT_FILE, *pictures) if (folder / name).is_file()]
    hub_name = repository.partition("/")[2]
    card = model_card(checkpoint, hub_name, repository, license_name=license_name, base_model=base_model).encode()
    sizes = {name: (folder / name).stat().st_size for name in names} | {CARD: len(card)}
    if dry_run:
        return dict(sorted(sizes.items()))
    api = HfApi(library_name="ddp-vllm")
    message = f"{checkpoint.config['model_type']} pruned by ddp-vllm"
    branch: dict[str, Any] = {"repo_id": repository, "revision": revision, "commit_message": message}
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        # a commit does not make its branch
        if revision and revision != "main" and not revision.startswith("refs/"):
            api.create_branch(repository, branch=revision, exist_ok=True)
        api.upload_folder(folder_path=folder, allow_patterns=names, **branch)
        api.upload_file(path_or_fileobj=card, path_in_repo=CARD, **branch)
    except Exception as error:  # errors of the hub, of the network and of three libraries
        reason = " ".join(str(error).split())[:300]
        raise OutputError(f"{repository} was not published ({type(error).__name__}: {reason})") from error
    return dict(sorted(sizes.items()))
