"""A written folder is read in a fresh process, as its users read it; one that differs is not announced."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seams
from commands import assert_refused, cases, invoke, passed
from runs import assert_same_weights, edit_json, edit_weights, prune, recover

from ddp_vllm import model_files
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.provenance import provenance_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]
Edit = Callable[[Path], Any]


def proof_of(folder: Path) -> dict[str, Any]:
    """Return what the masks file of a folder states, which is on its card too."""
    proof: dict[str, Any] = read_checkpoint(folder).provenance["proof"]
    assert f"{proof['tokens']:,} tokens the same, logits within" in (folder / "README.md").read_text()
    return proof


BY_DAY = ("prune", "tokenizer")


@pytest.mark.parametrize("verb", cases(["prune", "recover", "apply"], BY_DAY))
@pytest.mark.usefixtures("proving")
def test_a_fresh_process_finds_the_measured_model(
    verb: str, pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the caller's path leads to code that transformers keeps of other models, as a worker's of vLLM does. A
    recovery without proof does not inherit that of the pruned folder."""
    (tmp_path / "modules" / "transformers_modules").mkdir(parents=True)
    (tmp_path / "modules" / "transformers_modules" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    output = tmp_path / "out"
    if verb == "prune":
        result = prune(tiny_model, tiny_text, output, "--train", "weights")
    elif verb == "recover":
        result = recover(pruned, output)
    else:
        result = invoke("apply", tiny_model, "--masks", pruned / MASKS_FILE, "-o", output)
    assert "tokens the same, logits within" in passed(result).output
    proof = proof_of(output)
    assert proof["tokens"] > 100 and proof["logits"] < 1e-5 and proof["tolerance"] == 2e-3 and not proof["fault"]
    if verb == "prune":
        passed(recover(output, tmp_path / "more", "--no-proof"))
        assert read_checkpoint(tmp_path / "more").provenance["proof"] == {}


@pytest.mark.parametrize("own", [None, "{{ messages }}"])
@pytest.mark.usefixtures("proving_here")
def test_the_chat_template_of_a_processor_is_no_fault(
    own: str | None, pruned: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Text is rendered by it, and the tokenizer of the written folder has its own, as that of the dense model."""
    dense = Path(shutil.copytree(tiny_model, tmp_path / "dense"))
    edit_json(dense / "chat_template.json", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    edit_json(dense / "tokenizer_config.json", **({"chat_template": own} if own else {}))
    passed(invoke("apply", dense, "--masks", pruned / MASKS_FILE, "-o", tmp_path / "out"))
    assert proof_of(tmp_path / "out")["fault"] == ""


SPOILED: dict[str, tuple[Edit, str]] = {
    "tokenizer": (lambda folder: edit_json(folder / "tokenizer.json", normalizer={"type": "Lowercase"}),
                  "its tokenizer has other tokens than the dense model's"),
    "template": (lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
                 "its tokenizer has other templates than the dense model's"),
    "config": (lambda folder: edit_json(folder / "config.json", rms_norm_eps=1.0),
               "away from those of the model that was measured, of which rounding explains 0.002"),
    "code": (lambda folder: (folder / "modeling_ddp.py").write_text("raise RuntimeError('no such model')"),
             "transformers cannot load it (RuntimeError: no such model)"),
    "weights": (lambda folder: edit_weights(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan"))),
                "its logits are inf away"),
}  # fmt: skip


@pytest.mark.parametrize("part", cases(SPOILED, BY_DAY))
@pytest.mark.usefixtures("proving_here")
def test_a_folder_that_differs_is_kept_under_another_name(
    part: str, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command writes it all the same with --no-proof; it resumes after the last step."""
    edit, words = SPOILED[part]
    state, output = model_files.state_tokenizer, tmp_path / "out"

    def state_and_spoil(model: str, folder: Path, **options: Any) -> None:
        state(model, folder, **options)  # which would repair the tokenizer
        edit(folder)

    with monkeypatch.context() as patch:
        patch.setattr(seams.export_module, "state_tokenizer", state_and_spoil)
        result = prune(tiny_model, tiny_text, output)
    unproved = tmp_path / "out.unproved"
    assert_refused(result, 7, words, str(unproved), "do not serve it", "--no-proof")
    assert not output.exists() and "serve it:" not in result.stdout
    assert words.split(";")[0] in provenance_of(unproved)["proof"]["fault"]
    card = (unproved / "README.md").read_text()
    assert "FAILED: " in card and words in card
    result = passed(prune(tiny_model, tiny_text, output, "--no-proof"))
    assert "resuming after step 6" in result.output
    assert read_checkpoint(output).provenance["proof"] == {}
    assert "not compared with the measured model" in (output / "README.md").read_text()
    if part == "tokenizer":
        assert_same_weights(unproved, output)
