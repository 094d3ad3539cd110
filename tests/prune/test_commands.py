"""`prune`, `apply` and `inspect` end to end: what they write and print, with values, for every kind of model."""

import json
import math
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import seams
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from commands import assert_refused, invoke, passed, write_lines
from family_cases import CASES, SIZES, write_random
from runs import SMALL, assert_written_as_evaluated, edit_weights, loss_of, prune, recover, same_weights, weights
from safetensors.torch import load_file
from seams import Trainer, load_tokenizer
from transformers import AutoModelForCausalLM

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_facts import describe_model
from ddp_vllm.pages.report import write_report
from ddp_vllm.remote_code.widths import HEAD

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache", "no_pictures")]
RAIN = "Rain fell on the harbour while the boats waited. " * 200


def test_prune_writes_a_model_that_knows_how_it_was_made(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other.txt").write_text(RAIN)
    output = tmp_path / "models" / "my model"
    result = passed(prune(tiny_model, tiny_text, output, "--watch", other))
    assert result.stderr == "" and [path.name for path in output.parent.iterdir()] == ["my model"]  # nothing temporary
    layers, provenance = read_checkpoint(output).layers, read_checkpoint(output).provenance
    assert sum(layer.num_kv_heads for layer in layers) == 7  # round(0.6·3·4)
    assert sum(layer.intermediate_size for layer in layers) == 173  # round(0.6·3·96)
    assert seams.load_recipe(None, provenance["recipe"]).model == tiny_model.name
    assert provenance["recipe"]["steps"] == 6 and provenance["head_unit"] == "kv-group"
    assert provenance["targets"] == pytest.approx({"attn": 0.4, "mlp": 0.4}, abs=0.02)
    assert set(provenance["rounding"]) == {"attn", "mlp"} and list(provenance["watched"]) == ["other.txt"]
    assert set(provenance["rounding"]["mlp"]) == {"raw_sparsity", "revived", "dropped"}
    assert provenance["search_steps"] == 4 and provenance["texts"] == [tiny_text.name]
    assert len(provenance["run_id"]) == 16 and provenance["perplexity"]["dense"] > 1
    lines = (output / "ddp_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    text = result.stdout
    assert re.search(r"text: [\d,]+ tokens of .*held out", text.replace("\n", " "))
    assert "search 1/6" in text and "polish 6/6" in text and "173 of" in text
    assert re.search(r"held-out perplexity\s+dense \d+\.\d+ → pruned \d+\.\d+", text)
    commands = [f"vllm serve '{output}'", f"ddp-vllm bench sharegpt --dense {tiny_model} --pruned '{output}'"]
    assert all(f"{command}\n" in text for command in commands)  # as a shell takes them
    assert "\nvllm serve './my model'\n" in (output / "README.md").read_text()


@pytest.mark.parametrize("name", ["glm4_moe", pytest.param("olmo2", marks=pytest.mark.nightly)])
def test_an_architecture_without_a_row_in_families(
    name: str, dense: Callable[[str], Path], tiny_text: Path, tmp_path: Path
) -> None:
    result = passed(prune(dense(name), tiny_text, tmp_path / "pruned", "--budget", "params"))
    assert "not pruned: attention" in result.output and "plugin" not in result.output
    checkpoint = read_checkpoint(tmp_path / "pruned")
    assert 0 < checkpoint.removed < 0.4
    passed(invoke("apply", dense(name), "--masks", tmp_path / "pruned" / MASKS_FILE, "-o", tmp_path / "again"))
    assert read_checkpoint(tmp_path / "again").layers == checkpoint.layers
    assert same_weights(tmp_path / "pruned", tmp_path / "again")  # only masks were trained
    assert passed(invoke("inspect", tmp_path / "pruned")).output.count("removed") > 2
    dry = ["--sparsity", "0.3", "--dry-run", "--on", "h100-80gb", "--seq-len", "16", "-o", tmp_path / "none"]
    planned = passed(invoke("prune", dense(name), *dry)).output
    assert "not pruned: " in planned and "% of the prunable parameters = " in planned and "auto takes" in planned


def test_experts(tiny_experts: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    passed(prune(tiny_experts, tiny_text, tmp_path / "pruned", "--scope", "expert"))
    checkpoint = read_checkpoint(tmp_path / "pruned")
    kept = sum(sum(layer.expert_intermediate_sizes or ()) for layer in checkpoint.layers)
    assert kept == round(0.6 * 2 * 5 * 32)
    chosen = checkpoint.provenance["routing"]["chosen"]
    # 6 steps of 2 sequences of 16 tokens, two experts each
    assert list(chosen) == ["0", "1"] and all(sum(counts) == 6 * 2 * 16 * 2 for counts in chosen.values())
    card = (tmp_path / "pruned" / "README.md").read_text()
    assert "| expert channels | 320 | 192 |" in card and "| 1 | 5 |" in card
    masks = tmp_path / "pruned" / MASKS_FILE
    passed(invoke("apply", tiny_experts, "--masks", masks, "-o", tmp_path / "again"))
    assert same_weights(tmp_path / "again", tmp_path / "pruned")
    assert {"experts.gates", "experts.z", "experts.saliency"} == load_file(masks).keys()


@pytest.mark.parametrize("train", ["masks", pytest.param("weights", marks=pytest.mark.nightly)])
def test_whole_experts_and_then_channels(train: str, tiny_experts: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Of 5 experts 3 stay in each layer, which is all that either budget allows."""
    more = ["--sparsity", "0.3"] if train == "masks" else ["--sparsity", "0.4", "--budget", "params"]
    result = passed(prune(tiny_experts, tiny_text, tmp_path / "pruned", "--whole-experts", *more, "--train", train))
    assert "budget: keep 3 of 5 whole experts of each layer" in result.stdout
    checkpoint = read_checkpoint(tmp_path / "pruned")
    assert [sum(map(bool, layer.expert_intermediate_sizes or ())) for layer in checkpoint.layers] == [3, 3]
    assert checkpoint.is_stock and checkpoint.config["num_local_experts"] == 3
    assert checkpoint.dense_shapes == read_checkpoint(tiny_experts, dense=True).shapes
    assert_written_as_evaluated(tmp_path / "pruned", tiny_text)
    if train == "weights":
        return
    passed(invoke("apply", tiny_experts, "--masks", tmp_path / "pruned" / MASKS_FILE, "-o", tmp_path / "again"))
    assert same_weights(tmp_path / "pruned", tmp_path / "again")
    passed(recover(tmp_path / "pruned", tmp_path / "recovered", "--tokens", "64"))
    assert read_checkpoint(tmp_path / "recovered").config == checkpoint.config
    assert not same_weights(tmp_path / "recovered", tmp_path / "pruned")
    passed(prune(tmp_path / "recovered", tiny_text, tmp_path / "channels", "--sparsity", "0.4"))
    ragged = read_checkpoint(tmp_path / "channels")
    widths = [layer.expert_intermediate_sizes for layer in ragged.layers]
    assert not ragged.is_stock and [len(row or ()) for row in widths] == [3, 3] and len({*widths[0], *widths[1]}) > 2
    card = (tmp_path / "channels" / "README.md").read_text()
    assert "all figures compare with recovered, which has 3 of 5 experts per layer" in card
    compared = passed(invoke("compare", tmp_path / "channels", "-o", tmp_path / "page.html")).stdout
    assert "recovered (dense)" in compared and "held-out perplexity" in compared
    gates = torch.ones(2, 3, 32)
    gates[:, 1] = 0  # a second time, and then channels
    seams.cut(seams.open_source(str(tmp_path / "recovered")), {"experts": gates}, tmp_path / "fewer", "expert")
    assert read_checkpoint(tmp_path / "fewer").history.fewer_experts == (5, 3)
    source = seams.open_source(str(tmp_path / "fewer"))
    twice = seams.cut(source, seams.random_gates(source), tmp_path / "twice")
    assert twice.history.fewer_experts == (5, 2)


@pytest.mark.parametrize(
    ("name", "dtype", "train"),
    [
        ("phi3", torch.float32, "masks"),
        ("gemma2", torch.float32, "masks"),
        ("granite", torch.bfloat16, "weights"),  # with every bias; joint training rounds masters into bfloat16
    ],
)
def test_the_written_model_is_the_evaluated_one(
    name: str, dtype: torch.dtype, train: str, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    model = write_random(CASES[name], tmp_path / "dense", dtype, vocab_size=320, max_position_embeddings=256)
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, model)
    passed(prune(model, tiny_text, tmp_path / "out", "--train", train, "--dtype", str(dtype).removeprefix("torch.")))
    checkpoint = read_checkpoint(tmp_path / "out")
    evaluated = math.exp(loss_of(tmp_path / "out", tiny_text).mean())
    close = 1e-5 if dtype == torch.float32 else 0.02
    assert evaluated == pytest.approx(checkpoint.provenance["perplexity"]["pruned"], rel=close)
    gates, _ = seams.read_masks(tmp_path / "out" / MASKS_FILE)
    heads = sum(len(layer.query_heads_per_kv_head) for layer in checkpoint.layers)
    assert int((gates["attn"] > 0).sum()) == heads == round(0.6 * SIZES["num_hidden_layers"] * 4)
    assert sum(layer.intermediate_size for layer in checkpoint.layers) == round(0.6 * 4 * 72)


def test_joint_training_is_written_as_evaluated_and_better(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Mixtures are in tests/recover/test_mixtures.py."""
    perplexities = []
    (other := tmp_path / "other.txt").write_text(RAIN)
    for train in ("masks", "weights", "lora"):
        passed(prune(tiny_model, tiny_text, tmp_path / train, "--steps", "30", "--train", train, "--watch", other))
        perplexities.append(read_checkpoint(tmp_path / train).provenance["perplexity"])
        assert_written_as_evaluated(tmp_path / train, tiny_text)
    masks, full, lora = perplexities
    assert full["pruned"] < 0.9 * masks["pruned"] and lora["pruned"] < masks["pruned"]
    assert masks["dense"] == full["dense"] == lora["dense"]
    assert "trained together with the masks" in (tmp_path / "weights" / "README.md").read_text()
    assert "plus low-rank additions, which" in (tmp_path / "lora" / "README.md").read_text()
    # masks alone give a folder with the dense model's weights, which is worse, and says so
    masks_file = tmp_path / "weights" / MASKS_FILE
    result = passed(invoke("apply", tiny_model, "--masks", masks_file, "-o", tmp_path / "again"))
    (warning,) = (line for line in result.stderr.splitlines() if line.startswith("warning: "))
    assert "weights were trained together with these masks" in warning
    assert f"ddp-vllm recover {tmp_path / 'again'} -o NEW trains them" in warning
    assert loss_of(tmp_path / "again", tiny_text).mean() > math.log(full["pruned"]) + 0.1
    checkpoint = read_checkpoint(tmp_path / "again")
    write_report(checkpoint, tmp_path / "again")
    for page in ("README.md", "report.html"):
        text = unescape((tmp_path / "again" / page).read_text())
        assert "those of the dense model, although the masks were learned together with trained weights" in text
        assert "trained together with the masks" not in text and f"{full['pruned']:.2f}" not in text
        assert "Perplexity on other.txt" not in text  # it was watched by the model with trained weights
    assert not {"perplexity", "watched"} & checkpoint.provenance.keys()


def test_neither_micro_batches_nor_closed_units_that_are_not_computed_change_a_step(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of narrow copies arrive at the weights they were cut from."""
    monkeypatch.setattr(seams.gates_module, "CHANNEL_BLOCK", 4)
    options = ["--train", "weights", "--dtype", "float32", "--steps", "8", "--head-unit", "query-head"]

    def trained(name: str, *more: str) -> dict[str, Any]:
        passed(prune(tiny_model, tiny_text, tmp_path / name, *options, *more))
        return weights(tmp_path / name)

    narrow, cut = trained("narrow"), trained("cut", "--micro-batch-size", "1")
    monkeypatch.setattr("seams.learn_module.narrow_layers", lambda *_: None)
    for name, tensor in trained("whole").items():
        torch.testing.assert_close(narrow[name], tensor, atol=2e-4, rtol=0)
        torch.testing.assert_close(cut[name], tensor, atol=2e-4, rtol=0)


def test_weights_that_were_harmed_are_reported_on_each_text(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """A model that knew of rain, and forgot it over another text, which it learned."""
    (other := tmp_path / "other.txt").write_text(RAIN)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), load_tokenizer(str(tiny_model))
    blocks = torch.tensor(tokenizer(RAIN, verbose=False)["input_ids"])[:1024].view(16, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        model(blocks, labels=blocks).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    knowing = shutil.copytree(tiny_model, tmp_path / "model")
    model.save_pretrained(knowing)

    def run(name: str, rate: str) -> str:
        options = ["--train", "weights", "--steps", "12", "--learning-rate", rate, "--watch", other]
        return passed(prune(knowing, tiny_text, tmp_path / name, *options)).output.replace("\n", " ")

    harmed, sound = run("harmed", "0.1"), run("sound", "1e-5")
    assert re.search(f"perplexity on held-out text of {other}: dense [0-9.]+ → pruned [0-9.]+", sound)
    assert "did harm" not in sound and f"on {tiny_text} training the weights did harm" not in harmed
    harm = re.search(f"on {other} training the weights did harm: perplexity ([0-9.]+), ([0-9.]+) with", harmed)
    perplexity = read_checkpoint(tmp_path / "harmed").provenance["watched"]["other.txt"]
    assert harm and float(harm[1]) == pytest.approx(perplexity["pruned"], rel=1e-3) and float(harm[2]) < float(harm[1])
    assert perplexity["dense"] < 20 and perplexity["agreement"]["pruned"]["kl"] >= 0


@pytest.mark.parametrize(("after", "is_harm"), [
    ([3.2, 3.22, 3.21, 3.2], True),
    ([3.1, 2.9, 3.2, 2.89], False),  # 0.02 higher on average, which four blocks cannot tell from chance
    ([3.009, 3.009, 3.009, 3.009], False),  # certain, and too little to speak of
    ([2.8, 2.81, 2.79, 2.8], False),  # further from the dense model, because it learned the text
    ([math.nan, 3.0, 3.0, 3.0], True),
])  # fmt: skip
def test_harm_is_claimed_where_blocks_agree_on_it(after: list[float], is_harm: bool) -> None:
    lines = list[str]()
    evaluated = SimpleNamespace(losses={"text": {"pruned": after}}, block_tokens={"text": [9] * 4})
    seams.jobs.warn_of_harm(evaluated, {"text": [3.0] * 4}, lines.append)
    assert ("training the weights did harm" in "".join(lines)) is is_harm


def test_two_watched_texts_have_two_names(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Results are published by the names of files: one of the texts would be lost. The texts of the pruning run, which
    a recovery watches, may be called alike."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "rain.txt").write_text(f"{folder.name} {RAIN}")
    both = ",".join(str(folder / "rain.txt") for folder in folders)
    refused = prune(tiny_model, tiny_text, tmp_path / "out", "--watch", both)
    assert_refused(refused, 4, "two watched texts are called rain.txt; rename one")
    passed(prune(tiny_model, both, tmp_path / "out"))
    result = passed(recover(tmp_path / "out", tmp_path / "more", "--data", tiny_text, "--tokens", "32"))
    assert f"{folders[1] / 'rain.txt'} is not watched: two watched texts are called" in result.output.replace("\n", " ")
    assert [*read_checkpoint(tmp_path / "more").provenance["recovery"]["watched"]] == ["rain.txt"]


def test_options_change_what_recover_trains(pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """But not the loss on turns of an assistant, of whom the text has none."""
    options = ["--train", "weights", "--teacher", tiny_model, "--data", tiny_text, "--tokens", "128"]
    passed(recover(pruned, tmp_path / "plain", *options))
    for option, value, is_same in (
        ("--distillation", "0", False), ("--warmup", "0.9", False), ("--learn-from", "all", True)
    ):  # fmt: skip
        passed(recover(pruned, tmp_path / option, *options, option, value))
        assert same_weights(tmp_path / "plain", tmp_path / option) is is_same, option


def test_prune_takes_the_loss_on_an_assistants_turns_if_told(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    (model / "chat_template.jinja").write_text(template)

    def chats(name: str, *roles: str) -> Path:
        rows = [{"messages": [{"role": role, "content": f"nine foxes {i} jump"} for role in roles]} for i in range(90)]
        return write_lines(tmp_path / name, rows)

    both, masks = chats("both.jsonl", "user", "assistant"), []
    for source in ("all", "assistant"):
        passed(prune(model, both, tmp_path / source, "--learn-from", source))
        masks.append(load_file(tmp_path / source / MASKS_FILE))
    assert any(not torch.equal(masks[0][name], masks[1][name]) for name in masks[0])
    result = prune(model, chats("asked.jsonl", "user"), tmp_path / "asked", "--learn-from", "assistant")
    assert_refused(result, 4, "holds no words of an assistant; try --learn-from all")


@pytest.fixture
def heard() -> Iterator[None]:
    """Python's own answer to Ctrl-C, which a job in the background does not inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_lets_the_step_end_and_saves_it(
    pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Before the first regular save; a second one ends the run at once. Trackers are closed."""
    step, closed = Trainer.step, list[object]()
    monkeypatch.setattr(seams.jobs, "finish_run", closed.append)

    def interrupted(times: int) -> Callable[..., dict[str, float]]:
        def take(self: Trainer, number: int) -> dict[str, float]:
            for _ in range(times if number == 3 else 0):
                signal.raise_signal(signal.SIGINT)
            return step(self, number)

        return take

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted(1))
        result = prune(tiny_model, tiny_text, tmp_path / "out")
        assert result.exit_code == 130 and "stopping after this step" in capfd.readouterr().err
        assert result.stderr == "\nddp-vllm: stopped at step 4 of 6; the same command resumes\n"
        patch.setattr(Trainer, "step", interrupted(2))
        result = prune(tiny_model, tiny_text, tmp_path / "other")
        assert result.exit_code == 130 and result.stderr == "\nddp-vllm: stopped\n"
    assert len(closed) == 2
    result = passed(prune(tiny_model, tiny_text, tmp_path / "out"))
    assert "resuming after step 4" in result.stdout and same_weights(tmp_path / "out", pruned)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_is_noted_though_nothing_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError("no space left")

    with monkeypatch.context() as patch, seams.loop_module.stopping(alone=True) as interrupts:
        patch.setattr("os.write", full)
        signal.raise_signal(signal.SIGINT)
    assert interrupts == [signal.SIGINT]


class Notes(GeneralTracker):
    """A tracker that keeps what it gets. As for tensorboard, settings must be plain values."""

    name, requires_logging_directory, main_process_only, tracker = "notes", True, True, None
    runs: ClassVar[list[tuple[str, dict[str, Any], list[int | None]]]] = []

    def __init__(self, run_name: str, logging_dir: str, **_: Any) -> None:
        super().__init__()
        self.runs.append((run_name, {}, []))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        assert all(isinstance(value, int | float | str | bool) for value in values.values())
        self.runs[-1][1].update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.runs[-1][2].append(step)


def test_a_tracker_gets_settings_and_metrics(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.devices, "get_available_trackers", lambda: ["notes"])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notes", Notes)
    passed(prune(tiny_model, tiny_text, tmp_path / "out", "--tracker", "notes"))
    passed(recover(tmp_path / "out", tmp_path / "more", "--tokens", "32", "--tracker", "notes"))
    assert [(name, steps) for name, _, steps in Notes.runs] == [
        ("ddp-vllm", [1, 2, 3, 4, 5, 6]), ("ddp-vllm-recover", [1])
    ]  # fmt: skip
    # a second size continues from the middle of the first, but a tracker drops steps that go back
    passed(prune(tiny_model, tiny_text, tmp_path / "sizes", "--sparsity", "0.2,0.4", "--tracker", "notes"))
    assert Notes.runs[2][2] == [1, 2, 3, 4, 5, 6]
    assert Notes.runs[0][1]["alm.mu_start"] == 0.5 and Notes.runs[1][1]["tokens"] == 32


BOS, VOCABULARY = 7, 320


def test_a_run_warns_of_a_missing_bos_and_its_remedy_works(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Of a model trained on text after BOS, and on random tokens without it."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    text = torch.tensor(tokenizer(tiny_text.read_text(), verbose=False)["input_ids"])
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(80):
        blocks = torch.randint(1, VOCABULARY, (16, 16))
        for row in range(8):
            start = int(torch.randint(len(text) - 15, ()))
            blocks[row] = torch.cat([torch.tensor([BOS]), text[start : start + 15]])
        model(blocks, labels=blocks).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.config.bos_token_id = BOS
    model.save_pretrained(folder)
    warned = passed(prune(folder, tiny_text, tmp_path / "out")).output
    found = re.search(
        r"warning: the tokenizer of .* omits BOS.* on held-out text is ([\d.]+) instead of ([\d.]+); (.*)", warned
    )
    assert found and float(found[1]) < 0.9 * float(found[2])
    exec(f"import transformers; {found[3].removeprefix('add it: ')}")  # the line that users are told
    assert load_tokenizer(str(folder))("fox")["input_ids"][0] == BOS
    assert "omits BOS" not in passed(prune(folder, tiny_text, tmp_path / "after")).output


def test_there_is_no_warning_for_a_model_that_needs_no_bos(tiny_model: Path, tiny_text: Path) -> None:
    """Many configs name a BOS token that no text begins with, such as Qwen's."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), load_tokenizer(str(tiny_model))
    heldout = seams.heldout_of(tiny_model, tiny_text, 16)
    for bos in (None, BOS, VOCABULARY):
        model.config.bos_token_id = bos
        assert seams.bos_warning(model, "tiny", tokenizer, heldout) == ""


def test_an_embedding_that_is_stored_as_the_head_too_counts_once(
    tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """The model has the size that was asked for, and the pages name the dense model's own."""
    dense = Path(shutil.copytree(tiny_model, tmp_path / "dense"))
    edit_weights(dense, lambda tensors: tensors.update({HEAD: tensors["model.embed_tokens.weight"].clone()}))
    result = passed(invoke("prune", dense, "--target", "70K", "--data", tiny_text, "-o", tmp_path / "out", *SMALL))
    checkpoint = read_checkpoint(tmp_path / "out")
    assert 69_000 < checkpoint.num_parameters <= 70_000 and HEAD not in weights(tmp_path / "out")
    sizes = [sum(map(math.prod, checkpoint.dense_shapes.values()))]
    sizes += [describe_model(str(folder)).parameters for folder in (dense, tiny_model)]
    assert len(set(sizes)) == 1 and f"of {sizes[0]:>15,}" in result.stdout
