"""Publishing, against a stand-in of the hub's API that keeps what it is sent."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from commands import assert_refused, invoke, passed
from written_folders import write_model


class Hub(BaseHTTPRequestHandler):
    """The calls of a commit, as huggingface_hub makes them; all files go in the commit itself."""

    received: dict[str, Any]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        action, _, branch = self.path.removeprefix("/api/models/me/tiny/").partition("/")
        here, code, answer = f"http://{self.headers['Host']}/me/tiny", 200, dict[str, Any]()
        if self.headers.get("Authorization") != "Bearer hf_good":
            code, answer = 401, {"error": "Invalid username or password."}
        elif self.path == "/api/repos/create":
            self.received["repository"] = json.loads(body)
            answer = {"url": here}
        elif self.path == "/api/validate-yaml":  # of the card
            answer = {"errors": [], "warnings": []}
        elif (action == "branch") == (branch in self.received["branches"]):  # exists already, or does not exist yet
            code, answer = 409 if action == "branch" else 404, {"error": self.path}
        elif action == "branch":
            self.received["branches"].add(branch)
        elif action == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        else:
            self.received["branch"] = branch
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.received[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": f"{here}/commit/{'1' * 40}", "commitOid": "1" * 40}
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Yield what the stand-in received."""
    Hub.received = {"branches": {"main", "old"}}
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the caller's may be set
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Hub.received
        server.shutdown()
        thread.join()


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    return write_model(tmp_path / "pruned", widths=[(1, 5), (2, 16)], origin="owner/tiny")


def test_what_arrives_is_whole_and_says_how_to_load_it(pruned: Path, hub: dict[str, Any]) -> None:
    (pruned / "eval" / "deep").mkdir(parents=True)
    local = ["eval/deep/results.json", "sharegpt-offline.json", "bench.json", "steps.json", "machine.json"]
    local += ["page.html", "notes.txt", ".env", "run.py", "eval/config.json", "events.out.tfevents.1", "train.jsonl"]
    for name in local:
        (pruned / name).write_text("{}")
    (pruned / "additional_chat_templates").mkdir()
    sent = ["tokenizer.json", "LICENSE", "report.html", "ddp_metrics.jsonl", "preprocessor_config.json", "vocab.txt"]
    sent += ["additional_chat_templates/rag.jinja", "chat_template.jinja", "modeling_ddp.py"]
    for name in sent:
        (pruned / name).write_text(name)
    done = passed(invoke("push", pruned, "me/tiny", "--private", "--license", "apache-2.0", "--revision", "new"))
    assert done.stdout.startswith("published: ") and "/me/tiny/" in done.stdout
    created, branch, branches = hub.pop("repository"), hub.pop("branch"), hub.pop("branches")
    assert branch == "new" and branches == {"main", "old", "new"}
    assert (created["name"], created["organization"], created["visibility"]) == ("tiny", "me", "private")
    here = {str(path.relative_to(pruned)): path.read_bytes() for path in pruned.rglob("*") if path.is_file()}
    for name in ("README.md", *local):
        here.pop(name, None)
    card = hub.pop("README.md").decode()
    assert hub == here and "config.json" in here
    assert "vllm serve me/tiny\n" in card and "license: apache-2.0" in card and "base_model: owner/tiny" in card


def test_what_cannot_be_published_is_one_line(
    pruned: Path, hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refused(invoke("push", pruned, "me/x.git"), 5, "me/x.git was not published")
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    assert_refused(invoke("push", pruned, "me/tiny"), 5, "me/tiny was not published", "401")
    (pruned / "config.json").write_text("{}")
    assert_refused(invoke("push", pruned, "me/tiny"), 7, "is not a pruned checkpoint")
    assert "repository" not in hub
