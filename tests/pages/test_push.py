"""Publishing: what is sent to the hub, by the calls of its library, and what cannot be sent."""

from pathlib import Path
from unittest.mock import Mock, create_autospec

import pytest
from commands import assert_refused, invoke, passed
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from written_folders import write_model


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The hub's library, which takes only calls that it has, and answers without a network."""
    api: Mock = create_autospec(HfApi, instance=True)
    api.create_repo.return_value.repo_id = "me/tiny"
    api.upload_file.return_value = "https://hub/me/tiny/commit/1"
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: api)
    return api


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    return write_model(tmp_path / "pruned", widths=[(1, 5), (2, 16)], origin="owner/tiny")


def test_what_arrives_is_whole_and_says_how_to_load_it(pruned: Path, hub: Mock) -> None:
    (pruned / "eval" / "deep").mkdir(parents=True)
    local = ["eval/deep/results.json", "sharegpt-offline.json", "bench.json", "steps.json", "machine.json"]
    local += ["page.html", "notes.txt", ".env", "run.py", "eval/config.json", "events.out.tfevents.1", "train.jsonl"]
    (pruned / "additional_chat_templates").mkdir()
    sent = ["tokenizer.json", "LICENSE", "report.html", "ddp_metrics.jsonl", "preprocessor_config.json", "vocab.txt"]
    sent += ["additional_chat_templates/rag.jinja", "chat_template.jinja", "modeling_ddp.py"]
    for name in (*local, *sent):
        (pruned / name).write_text("{}")
    done = passed(invoke("push", pruned, "me/tiny", "--private", "--license", "apache-2.0", "--revision", "new"))
    assert done.stdout == "published: https://hub/me/tiny/commit/1\n"
    hub.create_repo.assert_called_once_with("me/tiny", private=True, exist_ok=True)
    hub.create_branch.assert_called_once_with("me/tiny", branch="new", exist_ok=True)
    folder, card = hub.upload_folder.call_args.kwargs, hub.upload_file.call_args.kwargs
    assert folder["folder_path"] == str(pruned) and folder["repo_id"] == card["repo_id"] == "me/tiny"
    assert folder["revision"] == card["revision"] == "new" and card["path_in_repo"] == "README.md"
    here = {str(path.relative_to(pruned)) for path in pruned.rglob("*") if path.is_file()}
    assert {*filter_repo_objects(here, allow_patterns=folder["allow_patterns"])} == here - {"README.md", *local}
    assert {*sent, "config.json", "model.safetensors"} <= here
    text = card["path_or_fileobj"].decode()
    assert "vllm serve me/tiny\n" in text and "license: apache-2.0" in text and "base_model: owner/tiny" in text


def test_what_cannot_be_published_is_one_line(pruned: Path, hub: Mock) -> None:
    hub.upload_file.side_effect = RuntimeError("401\nInvalid username or password.")
    assert_refused(invoke("push", pruned, "me/tiny"), 5, "me/tiny was not published (RuntimeError: 401 Invalid user")
    hub.create_branch.assert_not_called()
    hub.reset_mock()
    (pruned / "config.json").write_text("{}")
    assert_refused(invoke("push", pruned, "me/tiny"), 7, "is not a pruned checkpoint")
    hub.create_repo.assert_not_called()
