"""Publishing, against a stand-in of the hub's API that keeps what it is sent."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from written_folders import write_model

pytestmark = pytest.mark.slow


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    return write_model(tmp_path / "pruned", widths=[(1, 5), (2, 16)], origin="owner/tiny")


class Hub(BaseHTTPRequestHandler):
    """The calls of a commit, as huggingface_hub makes them; all files go in the commit itself."""

    received: dict[str, Any]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers.get("Authorization") != "Bearer hf_good":
            return self._answer({"error": "Invalid username or password."}, code=401)
        if self.path == "/api/repos/create":
            self.received["repository"] = json.loads(body)
            return self._answer({"url": f"http://{self.headers['Host']}/me/tiny"})
        if self.path == "/api/validate-yaml":  # of the card
            return self._answer({"errors": [], "warnings": []})
        action, _, branch = self.path.removeprefix("/api/models/me/tiny/").partition("/")
        if (action == "branch") == (branch in self.received["branches"]):  # it exists already, or does not exist yet
            return self._answer({"error": self.path}, code=409 if action == "branch" else 404)
        return self._answer(getattr(self, f"_{action}")(branch, body))

    def _branch(self, branch: str, _: str) -> dict[str, Any]:
        self.received["branches"].add(branch)
        return {}

    def _preupload(self, _: str, body: str) -> dict[str, Any]:
        names = [file["path"] for file in json.loads(body)["files"]]
        return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}

    def _commit(self, branch: str, body: str) -> dict[str, Any]:
        self.received["branch"] = branch
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.received[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        there = f"http://{self.headers['Host']}/me/tiny/commit/{'1' * 40}"
        return {"commitUrl": there, "commitOid": "1" * 40}

    def _answer(self, content: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, dict[str, Any]]]:
    Hub.received = {"branches": {"main", "old"}}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", Hub.received
        server.shutdown()
        thread.join()


def push(*words: object, endpoint: str, token: str = "hf_good") -> "subprocess.CompletedProcess[str]":
    """In a process of its own: huggingface_hub reads its settings when it is imported."""
    settings = {"HF_ENDPOINT": endpoint, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "ddp_vllm", "push", *map(str, words)]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)


def test_what_arrives_is_whole_and_says_how_to_load_it(pruned: Path, hub: Any) -> None:
    endpoint, received = hub
    (pruned / "eval" / "deep").mkdir(parents=True)
    for name in ("eval/deep/results.json", "sharegpt-offline.json"):
        (pruned / name).write_text("{}")
    done = push(pruned, "me/tiny", "--private", "--license", "apache-2.0", endpoint=endpoint)
    assert done.returncode == 0 and done.stdout.startswith("published: ") and "/me/tiny/" in done.stdout, done.stderr
    created, branch, _ = received.pop("repository"), received.pop("branch"), received.pop("branches")
    assert branch == "main"
    assert (created["name"], created["organization"]) == ("tiny", "me")
    assert created["visibility"] == "private"
    here = {str(path.relative_to(pruned)): path.read_bytes() for path in pruned.rglob("*") if path.is_file()}
    for name in ("README.md", "eval/deep/results.json", "sharegpt-offline.json"):
        here.pop(name, None)
    card = received.pop("README.md").decode()
    assert received == here and "config.json" in here
    assert "vllm serve me/tiny\n" in card and "license: apache-2.0" in card and "base_model: owner/tiny" in card


def test_a_branch_is_made(pruned: Path, hub: Any) -> None:
    done = push(pruned, "me/tiny", "--revision", "new", endpoint=hub[0])
    assert done.returncode == 0, done.stderr
    assert hub[1]["branch"] == "new" and hub[1]["branches"] == {"main", "old", "new"}


def test_the_hubs_refusal_is_one_line(pruned: Path, hub: Any) -> None:
    done = push(pruned, "me/tiny", endpoint=hub[0], token="hf_bad")
    assert done.returncode == 5 and done.stderr.count("\n") == 1 and "me/tiny was not published" in done.stderr


def test_a_name_without_an_owner_and_a_damaged_folder_are_refused(pruned: Path, hub: Any) -> None:
    done = push(pruned, "me/x.git", endpoint=hub[0])
    assert done.returncode == 5 and done.stderr.count("\n") == 1 and "me/x.git was not published" in done.stderr
    (pruned / "config.json").write_text("{}")
    done = push(pruned, "me/tiny", endpoint=hub[0])
    assert done.returncode == 7 and "is not a pruned checkpoint" in done.stderr and "repository" not in hub[1]
