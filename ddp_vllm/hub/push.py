"""Publish a pruned model: the files of its manifest, and a card with the commands that load it from the hub."""

import hashlib
import re
from pathlib import Path

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import OutputError, SettingError
from ddp_vllm.manifest import MANIFEST, check_manifest, to_text
from ddp_vllm.pages.card import model_card

CARD = "README.md"
_PART = r"\w[\w.-]{0,95}(?<![.-])"
REPOSITORY = re.compile(rf"(?!.*(--|\.\.|\.git$)){_PART}/{_PART}", re.ASCII)  # as the hub's own client checks


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
    """Publish a pruned checkpoint on the Hugging Face hub and return the bytes of each file by its name.

    repository: OWNER/NAME. license_name: of the dense model, in the hub's spelling. base_model: the dense model on the
    hub, by default the one it was pruned from. revision: a branch, which is made if it is new. dry_run: only return
    what would be published.
    Raises: CheckpointError if the folder has changed since it was written; SettingError for a name that the hub
        refuses; OutputError if publishing fails.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    if not REPOSITORY.fullmatch(repository):
        raise SettingError(
            f"{repository} is not a repository name; give OWNER/NAME of letters, digits, '_', '-' and '.', each "
            "beginning and ending with a letter, digit or '_', without '--', '..' or a final '.git'"
        )
    folder = Path(folder)
    hashes, checkpoint = check_manifest(folder), read_checkpoint(folder)
    card = model_card(
        checkpoint, repository.partition("/")[2], repository, license_name=license_name, base_model=base_model
    ).encode()
    written = {CARD: card, MANIFEST: to_text(hashes | {CARD: hashlib.sha256(card).hexdigest()}).encode()}
    contents = {name: written.get(name, folder / name) for name in sorted({*hashes, *written})}
    sizes = {name: len(each) if isinstance(each, bytes) else each.stat().st_size for name, each in contents.items()}
    if dry_run:
        return sizes
    api = HfApi(library_name="ddp-vllm")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if revision and revision != "main" and not revision.startswith("refs/"):  # a commit does not make its branch
            api.create_branch(repository, branch=revision, exist_ok=True)
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=each) for name, each in contents.items()]
        message = f"{checkpoint.config['model_type']} pruned by ddp-vllm"
        api.create_commit(repository, operations, commit_message=message, revision=revision)
    except Exception as error:  # errors of the hub, of the network and of three libraries
        reason = " ".join(str(error).split())[:300]
        raise OutputError(f"{repository} was not published ({type(error).__name__}: {reason})") from error
    return sizes
