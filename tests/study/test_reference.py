"""The study of the pages: a call that was interrupted resumes, and a result names no path of this machine."""

import json
from pathlib import Path

import pytest

import reference

PROTOCOL = """
[tables.small]
texts = ["other.txt"]
eval = "--max-length 16 --tokens 128"

[tables.small.names]
text = "--data text.jsonl --seq-len 16 --batch-size 2"
prune = "prune {model} {text} --seed {seed} --steps 6 --heldout-blocks 4 --sparsity 0.4 --train masks"

[[tables.small.rows]]
name = "masks"
commands = ["{prune}"]

[[tables.small.rows]]
name = "fisher trained"
commands = [
    "study methods {model} {text} --methods fisher --sparsity 0.4 --test other.txt --test-length 16 --samples 4",
    "apply {model} --masks {0}/cells/fisher_0.4_0.safetensors",
    "recover {1} --teacher {model} {text} --tokens 64 --train weights --heldout-blocks 4",
]
"""


@pytest.mark.nightly
def test_an_interrupted_call_resumes_and_results_name_no_paths(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.jsonl").write_text(tiny_text.read_text())
    (tmp_path / "other.txt").write_text("Rain fell on the harbour while the boats waited. " * 200)
    (tmp_path / "protocol.toml").write_text(PROTOCOL)
    monkeypatch.setattr(reference, "PROTOCOL", tmp_path / "protocol.toml")
    monkeypatch.setattr(reference, "RESULTS", tmp_path / "results")

    def call(minutes: float) -> None:
        words = ["--data", str(tmp_path), "--models", f"tiny={tiny_model}", "--seeds", "1", "--minutes", str(minutes)]
        monkeypatch.setattr("sys.argv", ["reference.py", *words])
        reference.main()

    with pytest.raises(SystemExit, match="the same command resumes"):
        call(0.0)
    assert not (tmp_path / "results").exists()
    call(20.0)
    found = {path.stem: path.read_text() for path in (tmp_path / "results" / "small").iterdir()}
    assert found.keys() == {"tiny-masks-0", "tiny-fisher-trained-0"}
    for text in found.values():
        assert str(tmp_path) not in text and str(tiny_model) not in text
        assert json.loads(text)["texts"]["other.txt"]["agreement"]["pruned"]["kl"] > 0
    assert not (tmp_path / "runs" / "small" / "tiny-masks-0").exists()
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "results" / "small").iterdir()}
    call(20.0)
    assert times == {path: path.stat().st_mtime_ns for path in times}
