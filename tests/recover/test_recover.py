"""Recovery: trained weights are written as evaluated, a killed run resumes to the bit, and refusals are one line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, edit_json, invoke, passed, quick_commands
from runs import assert_same_weights, assert_written_as_evaluated, die_at, edit_weights, prune, recover, weights
from seams import Learner
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ddp_prune.core.decoder import checkpoint_layers, lent
from ddp_prune.core.learn import Trainer
from ddp_prune.fit import MODES, held_bytes, state_bytes
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import open_source
from ddp_prune.recipe import Recipe
from ddp_prune.settings import RecoveryRecipe
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.masks import MASKS_FILE, Provenance
from ddp_vllm.provenance import local_provenance

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]


@pytest.fixture(scope="module")
def recovered(pruned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pruned model after thirty steps."""
    folder = tmp_path_factory.mktemp("recovered") / "out"
    with quick_commands():
        passed(recover(pruned, folder))
    return folder


@pytest.mark.parametrize("method", ["weights", "lora"])
def test_the_written_model_is_the_evaluated_one(method: str, pruned: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Plain transformers finds the stated perplexity; every weight but the embedding has moved."""
    result = passed(recover(pruned, tmp_path / "out", "--train", method, "--dtype", "float32"))
    assert "recovered" in result.output
    named = {"weights": "weights with adamw", "lora": "low-rank additions"}[method]
    assert f"training mode: {named} requires " in result.output
    before, after = read_checkpoint(pruned), read_checkpoint(tmp_path / "out")
    assert after.layers == before.layers and after.shapes == before.shapes
    quality, recovery = after.provenance["perplexity"], after.provenance["recovery"]
    assert quality["pruned"] == pytest.approx(before.provenance["perplexity"]["pruned"], rel=1e-4)
    assert quality["recovered"] < 0.9 * quality["pruned"]
    assert {path.name for path in pruned.glob("*.*")} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert len(recovery["prompts"]) == len(recovery["answers"]["recovered"]) == 10
    stated = {"train": method, "tokens": 960, "data": tiny_text.name}
    assert {name: recovery["recipe"][name] for name in stated} == stated
    assert "trained on the dense model's outputs, on 960 tokens of" in (tmp_path / "out" / "README.md").read_text()
    assert_written_as_evaluated(tmp_path / "out", tiny_text, "recovered", distance=2e-5)
    old, new = weights(pruned), weights(tmp_path / "out")
    norms = {name for name in old if "norm" in name} if method == "lora" else set()
    assert {name for name in old if torch.equal(old[name], new[name])} == {"model.embed_tokens.weight"} | norms


@pytest.mark.parametrize(("method", "steps"), [("weights", 7), ("lora", 3)])
def test_a_killed_run_resumes_to_the_bit(method: str, steps: int, pruned: Path, tmp_path: Path) -> None:
    options = ["--train", method, "--tokens", "320", "--save-every", "3"]
    passed(recover(pruned, tmp_path / "whole", *options))
    die_at(steps, lambda: recover(pruned, tmp_path / "out", *options), Learner)
    less_memory = ["--activation-checkpointing", "on", "--save-every", "5"]  # as an error advises; same gradients
    result = recover(pruned, tmp_path / "out", *options, *less_memory)
    assert f"resuming after step {steps // 3 * 3}" in result.output, result.output
    assert_same_weights(tmp_path / "whole", tmp_path / "out")
    lines = [json.loads(line)["step"] for line in (tmp_path / "out" / "ddp_recovery.jsonl").read_text().splitlines()]
    assert lines == list(range(1, 11))


def test_minutes_have_the_floor_of_pruning_and_become_tokens(
    pruned: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose clock tells 0.05 seconds per step; the stored recipe repeats the run."""
    monkeypatch.setattr("ddp_prune.resolve.seconds_a_step", lambda *_: 0.05)
    refused = invoke("recover", pruned, "-o", tmp_path / "no", "--minutes", "0.01")
    words = "minutes is 0.01, enough for 11 steps of 2 × 16 tokens where 20 are needed; give at least 1 for low-rank"
    assert_refused(refused, 2, words, "weights with adamw requires --minutes 1")
    result = passed(invoke("recover", pruned, "-o", tmp_path / "out", "--minutes", "0.025"))
    assert "0.025 minutes: 30 steps of 2 × 16 tokens, weights with adamw" in result.output.replace("\n", " ")
    recipe = read_checkpoint(tmp_path / "out").provenance["recovery"]["recipe"]
    assert recipe["tokens"] == 960 and not recipe["minutes"]
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in recipe.items() if name not in ("model", "teacher")]
    (tmp_path / "recipe.toml").write_text("".join(lines))
    again = ["--recipe", tmp_path / "recipe.toml", "--data", tiny_text]
    passed(invoke("recover", pruned, "-o", tmp_path / "again", *again))
    assert_same_weights(tmp_path / "out", tmp_path / "again")


def test_text_of_another_kind_is_watched_and_a_loss_on_it_is_reported(
    pruned: Path, recovered: Path, tiny_text: Path, tmp_path: Path, write_texts: Callable[..., Path]
) -> None:
    """A recovered model is recovered once more, on another text; text that is trained on is not watched."""
    numbers = write_texts("numbers.jsonl", [" ".join(str(i * j) for i in range(40)) for j in range(60)])
    many = ("--heldout-blocks", "16")
    passed(recover(pruned, tmp_path / "good", "--learning-rate", "5e-3", *many))
    badly = ("--learning-rate", "0.03", "--warmup", "0", *many)
    result = passed(recover(tmp_path / "good", tmp_path / "out", "--data", str(numbers), *badly))
    (name,) = read_checkpoint(tmp_path / "out").provenance["recovery"]["watched"]
    assert re.search(f"worse than before recovery on .*/{name};", result.output)
    assert f"worse than before recovery on {numbers}" not in result.output
    rows = [f"the fox number {i} jumps over {i * i} clouds and rests" for i in range(60)]
    text, part = write_texts("rows.jsonl", rows), write_texts("part.jsonl", rows[:30])
    result = recover(recovered, tmp_path / "no", "--data", str(text), "--watch", str(part), *many)
    assert_refused(result, 4, f"{text} trains on", f"held out of {part}", "--watch")


def test_masks_of_a_recovered_model_cut_the_dense_one_as_before_recovery(
    pruned: Path, recovered: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """And the result can be recovered from the model that the masks were applied to."""
    shutil.copytree(tiny_model, tmp_path / "copy")
    masks = recovered / "ddp_masks.safetensors"
    passed(invoke("apply", tmp_path / "copy", "--masks", masks, "-o", tmp_path / "again"))
    assert_same_weights(pruned, tmp_path / "again")
    assert not {"recovery", "perplexity"} & read_checkpoint(tmp_path / "again").provenance.keys()
    passed(recover(tmp_path / "again", tmp_path / "recovered", "--tokens", "64"))
    assert read_checkpoint(tmp_path / "recovered").provenance["recovery"]["recipe"]["teacher"] == "copy"


@pytest.mark.parametrize("verb", ["recover", "prune"])
def test_steps_run_with_the_attention_and_recomputation_that_were_fitted(
    verb: str, pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation before them is without both, and gives the model back as it was."""
    kind = Learner if verb == "recover" else Trainer
    step, seen = kind.step, list[tuple[bool, str]]()

    def look(self: Any, number: int) -> dict[str, float]:
        model = self.model
        flags = {layer.gradient_checkpointing and layer.training for layer in model.model.layers}
        seen.append((flags == {True}, model.config._attn_implementation))
        return step(self, number)

    monkeypatch.setattr(kind, "step", look)
    options = ("--dtype", "bfloat16", "--activation-checkpointing", "on")
    if verb == "recover":
        passed(recover(pruned, tmp_path / "out", *options, "--tokens", "64"))
    else:
        passed(prune(tiny_model, tiny_text, tmp_path / "out", *options))
    assert set(seen) == {(True, "eager")}


def test_a_lent_model_comes_back_as_it_was(tiny_model: Path) -> None:
    """Also after an error; in training or not, with settings of generation that another evaluation would read."""
    model = load_model(open_source(str(tiny_model)), "float32")
    checkpoint_layers(model, True)
    model.set_attn_implementation("eager")
    generation = model.generation_config
    with pytest.raises(KeyboardInterrupt), lent(model):
        checkpoint_layers(model, False)
        model.set_attn_implementation("sdpa")
        model.generation_config = None
        raise KeyboardInterrupt
    assert model.config._attn_implementation == "eager" and model.generation_config is generation
    assert all(layer.gradient_checkpointing and layer.training for layer in model.model.layers)


def test_the_estimate_counts_the_weights_that_a_recovery_loads(pruned: Path, tiny_model: Path) -> None:
    """The teacher of a pruning shares the embeddings, that of a recovery has its own."""
    dense = open_source(str(tiny_model))
    held = sum(parameter.nbytes for parameter in load_model(dense, "float32").parameters())
    embeddings = 320 * 64 * 4
    recovery = RecoveryRecipe(model=str(pruned), teacher=str(tiny_model), tokens=64)
    pruning = Recipe(model=str(tiny_model), sparsity=0.2)
    for recipe, shared in ((recovery, 0), (pruning, embeddings)):
        state = state_bytes("adamw", 4) * (held - embeddings) // 4
        mode = next(mode for mode in MODES if (mode.train, mode.optimizer) == ("weights", "adamw"))
        assert held_bytes(recipe, dense, mode, 4, 1) == 2 * held - shared + state


def test_the_card_states_the_tokens_that_were_trained_on(pruned: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Whole steps, and at least one: not the number that was asked for. Of several recoveries it states each."""
    for asked, trained in ((100, 96), (5, 32)):
        passed(recover(pruned, tmp_path / f"{asked}", "--tokens", f"{asked}"))
        assert f"outputs, on {trained} tokens of" in (tmp_path / f"{asked}" / "README.md").read_text()
        assert read_checkpoint(tmp_path / f"{asked}").provenance["recovery"]["tokens"] == trained
    (other := tmp_path / "other.jsonl").write_text(tiny_text.read_text().replace("fox", "dog"))
    passed(recover(tmp_path / "100", tmp_path / "again", "--tokens", "64", "--data", other))
    result = passed(recover(tmp_path / "again", tmp_path / "third", "--tokens", "32"))
    first, second = f"96 tokens of {tiny_text.name}", "64 tokens of other.jsonl"
    then = "; then trained on the dense model's outputs, on "
    trained_on = then.join(["frozen while the masks were learned", first, second, f"32 tokens of {tiny_text.name}"])
    card = (tmp_path / "third" / "README.md").read_text()
    assert "read; the recovery was trained on none of them." in card  # pruning may have been, with other settings
    for page in (result.stdout, card):
        assert trained_on in page
        assert f"The pruned model of these figures is one that had been recovered, on {first} and {second}." in page


def test_the_dense_model_and_the_text_are_found_from_another_folder(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths belong to the folder where the command ran; models/dense is no name on the hub elsewhere."""
    dense = Path(shutil.copytree(tiny_model, tmp_path / "models" / "dense"))
    text = Path(shutil.copy(tiny_text, tmp_path / "chats.jsonl"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    passed(prune("models/dense", Path("chats.jsonl"), Path("pruned"), "--steps", "2"))
    monkeypatch.chdir("other")
    (tmp_path / "other" / "chats.jsonl").write_text('{"text": "a text of that name"}\n')
    passed(recover(Path("../pruned"), Path("out"), "--tokens", "64"))
    recipe = local_provenance(Path("out", MASKS_FILE))["recipe"]
    assert (recipe["model"], recipe["data"]) == (str(dense), str(text))
    card = Path("out", "README.md").read_text()
    assert "dense, pruned by ddp-vllm" in card and "base_model" not in card and str(tmp_path) not in card


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


def test_a_teacher_of_other_tokens_is_refused(pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    """As after another trim to as many tokens. The figures of a recovery are over its teacher's."""
    teacher = Path(shutil.copytree(tiny_model, tmp_path / "teacher"))
    passed(recover(pruned, tmp_path / "out", "--tokens", "64", "--teacher", teacher))
    provenance = local_provenance(tmp_path / "out" / MASKS_FILE)
    assert Provenance.of(provenance).dense_model == str(teacher) != provenance["recipe"]["model"]

    def swap(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    edit_json(teacher / "tokenizer.json", swap)
    assert_refused(
        recover(pruned, tmp_path / "other", "--teacher", teacher), 3, "have different tokens", "a teacher with"
    )


def test_models_of_one_name_do_not_share_their_paths(
    pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same masks, applied to two of them, are otherwise the same file."""
    for name in ("one", "two"):
        dense = shutil.copytree(tiny_model, tmp_path / name / "dense")
        passed(invoke("apply", dense, "--masks", pruned / MASKS_FILE, "-o", tmp_path / f"of-{name}", "--no-proof"))
    for name in ("one", "two"):
        assert local_provenance(tmp_path / f"of-{name}" / MASKS_FILE)["applied_to"] == str(tmp_path / name / "dense")
    evaluated = ["eval", tmp_path / "of-one", "--text", tiny_text, "--max-length", "16", "--tokens", "128"]
    passed(invoke(*evaluated))
    assert "was pruned from other weights" not in caplog.text
    for name in ("one", "two"):  # another fine-tuning into the same folder
        edit_weights(tmp_path / name / "dense", lambda tensors: tensors["model.norm.weight"].add_(0.1))
    passed(invoke(*evaluated))
    assert "of-one was pruned from other weights than" in caplog.text
    passed(recover(tmp_path / "of-two", tmp_path / "better", "--tokens", "64", "--data", tiny_text))
    assert "of-two was pruned from other weights than" in caplog.text
