"""Recovery refuses in one line and leaves nothing behind."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import assert_refused, invoke, passed
from runs import recover
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ddp_vllm.masks import MASKS_FILE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]


def other_model(folder: Path, **sizes: int) -> str:
    settings = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**settings | sizes)).save_pretrained(folder / "other")
    return str(folder / "other")


def maskless(pruned: Path, folder: Path) -> str:
    shutil.copytree(pruned, folder / "maskless")
    (folder / "maskless" / "ddp_masks.safetensors").unlink()
    return str(folder / "maskless")


REFUSED: dict[str, tuple[Callable[[Path, Path, Path], list[str]], int, tuple[str, ...]]] = {  # arguments, code, words
    "teacher of another vocabulary": (
        lambda p, d, t: [str(p), "--teacher", other_model(t, vocab_size=300)], 3, ("vocab_size", "300", "320"),
    ),
    "teacher that is pruned": (lambda p, d, t: [str(p), "--teacher", str(p)], 3, ("pruned already",)),
    "no masks file": (lambda p, d, t: [maskless(p, t), "--teacher", str(d), "--data", str(p)], 7, ("ddp_masks",)),
    "a rate below 0": (lambda p, d, t: [str(p), "--learning-rate", "-1"], 2, ("--learning-rate is -1",)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_recovered_is_refused(case: str, pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    arguments, code, words = REFUSED[case]
    folder, *more = arguments(pruned, tiny_model, tmp_path)
    assert_refused(recover(Path(folder), tmp_path / "out", *more), code, *words)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.run").exists()


def test_a_dense_model_that_was_moved(pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    dense = Path(shutil.copytree(tiny_model, tmp_path / "dense"))
    masks = pruned / MASKS_FILE
    passed(invoke("apply", dense, "--masks", masks, "-o", tmp_path / "pruned", "--no-proof"))
    dense.rename(tmp_path / "moved")
    words = (str(dense), "pass its folder or Hub name with --teacher")
    assert_refused(recover(tmp_path / "pruned", tmp_path / "out", "--data", str(masks)), 2, *words)


def test_an_output_that_exists_is_left_alone(pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert_refused(recover(pruned, tmp_path / "out"), 5, "exists")
    assert_refused(recover(pruned, tiny_model, "--overwrite"), 5, f"{tiny_model} holds", "which this command reads")
    inside = tmp_path / "models" / "pruned"
    shutil.copytree(pruned, inside)
    (inside.parent / MASKS_FILE).touch()
    for output in (inside.parent, inside):  # and --overwrite is not suggested
        for more in ([], ["--overwrite"]):
            result = recover(inside, output, *more)
            assert_refused(result, 5, f"{output} holds {inside}, which this command reads; choose another folder")


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_what_was_saved(pruned: Path, tmp_path: Path) -> None:
    result = recover(pruned, tmp_path / "out", "--learning-rate", "1e30", "--warmup", "0", "--save-every", "1")
    assert_refused(result, 6, "the loss is", "the last save is in", "--learning-rate")
    assert (tmp_path / "out.run" / "run.json").exists() and not (tmp_path / "out").exists()


def test_a_tokenizer_that_knows_more_than_the_model(pruned: Path, tmp_path: Path) -> None:
    """A pad token outside the embedding harms nothing; a token of the text is refused."""
    folder = Path(shutil.copytree(pruned, tmp_path / "pruned"))
    tokenizer = AutoTokenizer.from_pretrained(pruned, trust_remote_code=True)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    passed(recover(folder, tmp_path / "out", "--tokens", "64"))
    tokenizer.add_tokens(["fox number"])
    tokenizer.save_pretrained(folder)
    assert_refused(recover(folder, tmp_path / "other"), 3, "makes token 321", "0 to 319")
