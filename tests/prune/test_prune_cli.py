"""The verbs prune, apply and inspect from end to end."""

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from click.testing import Result
from commands import assert_refused, invoke, passed
from runs import prune
from safetensors.torch import load_file, save_file

from ddp_prune.core import processes
from ddp_prune.recipe import load_recipe
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.tensor_parallel import tensor_parallel_sizes

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def pruned(tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_VLLM_CACHE", str(folder / "cache"))
        (folder / "models").mkdir()
        return folder / "models" / "pruned", prune(tiny_model, tiny_text, folder / "models" / "pruned")


def test_prune_writes_a_model_that_knows_how_it_was_made(pruned: tuple[Path, Result], tiny_model: Path) -> None:
    output, result = pruned
    assert result.exit_code == 0 and result.stderr == "", (result.output, result.exception)
    assert [path.name for path in output.parent.iterdir()] == ["pruned"]  # no run folder, nothing temporary
    layers, provenance = read_checkpoint(output).layers, read_checkpoint(output).provenance
    assert sum(layer.num_kv_heads for layer in layers) == 7  # round(0.6·3·4)
    assert sum(layer.intermediate_size for layer in layers) == 173  # round(0.6·3·96)
    assert load_recipe(None, provenance["recipe"]).model == tiny_model.name
    assert provenance["recipe"]["steps"] == 6 and provenance["head_unit"] == "kv-group"
    assert provenance["perplexity"]["dense"] > 1 and set(provenance["rounding"]) == {"attn", "mlp"}
    lines = (output / "ddp_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    text = result.stdout
    assert re.search(r"text: [\d,]+ tokens of .*held out", text.replace("\n", " "))
    assert "search 1/6" in text and "polish 6/6" in text and "173 of" in text
    assert re.search(r"held-out perplexity\s+dense \d+\.\d+ → pruned \d+\.\d+", text)
    assert "vllm serve" in text and "ddp-vllm bench sharegpt" in text


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("train", ["masks", "weights"])
def test_attention_that_is_not_pruned_stays_whole(
    train: str, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    result = passed(prune(tiny_model, tiny_text, tmp_path / "out", "--prune", "mlp", "--train", train))
    assert "attn" not in result.stdout
    checkpoint = read_checkpoint(tmp_path / "out")
    assert [layer.query_heads_per_kv_head for layer in checkpoint.layers] == [(2, 2, 2, 2)] * 3
    assert sum(layer.intermediate_size for layer in checkpoint.layers) == 173  # round(0.6·3·96)


@pytest.mark.usefixtures("no_pictures")
def test_widths_are_aligned_and_split_over_devices(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    result = passed(prune(tiny_model, tiny_text, tmp_path / "out", "--align", "16", "--tp", "2"))
    assert "budget: keep 173 of 288 mlp units (60.1%), mlp in blocks of 32" in result.stdout
    checkpoint = read_checkpoint(tmp_path / "out")
    widths = [layer.intermediate_size for layer in checkpoint.layers]
    assert sum(widths) == 160 and not any(width % 32 for width in widths)
    assert 2 in tensor_parallel_sizes(checkpoint.config, checkpoint.layers)
    assert re.search(r"--tensor-parallel-size 1, 2", (tmp_path / "out" / "README.md").read_text())


def test_apply_aligns_by_the_saliency_of_the_masks(
    pruned: tuple[Path, Result], tiny_model: Path, tmp_path: Path
) -> None:
    masks = pruned[0] / MASKS_FILE

    def apply(align: str, path: Path = masks) -> Result:
        return invoke("apply", tiny_model, "--masks", path, "-o", tmp_path / "out", "--align", align)

    passed(apply("32"))
    checkpoint = read_checkpoint(tmp_path / "out")
    widths = [layer.intermediate_size for layer in checkpoint.layers]
    assert sum(widths) == 160 and not any(width % 32 for width in widths)
    assert "perplexity" not in checkpoint.provenance  # it was that of other widths
    before, after = load_file(masks), load_file(tmp_path / "out" / MASKS_FILE)
    assert torch.equal(before["attn.gates"], after["attn.gates"])
    stayed = (before["mlp.gates"] > 0) & (after["mlp.gates"] > 0)
    assert torch.equal(before["mlp.gates"][stayed], after["mlp.gates"][stayed])
    assert (after["mlp.gates"][(before["mlp.gates"] == 0) & (after["mlp.gates"] > 0)] == 1).all()
    shutil.rmtree(tmp_path / "out")
    assert_refused(apply("97"), 2, "align is 97", "1 to 96")
    assert_refused(apply("0"), 2, "align is 0")
    provenance = json.dumps(read_checkpoint(pruned[0]).provenance)
    save_file({name: before[name] for name in ("attn.gates", "mlp.gates")}, tmp_path / "bare", {"ddp": provenance})
    assert_refused(apply("32", tmp_path / "bare"), 7, "no mlp.saliency", "prune again with --align")
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


@pytest.fixture
def heard() -> Iterator[None]:
    """Python's own answer to Ctrl-C, which a job in the background does not inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("no_pictures", "heard")
def test_ctrl_c_lets_the_step_end_and_saves_it(
    pruned: tuple[Path, Result],
    tiny_model: Path,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Before the first regular save; a second one ends the run at once."""
    from ddp_prune.core.trainer import Trainer

    step = Trainer.step

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
    result = passed(prune(tiny_model, tiny_text, tmp_path / "out"))
    assert "resuming after step 4" in result.stdout
    same = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "out", pruned[0])]
    assert same[0] == same[1]


class Notes(GeneralTracker):
    """A tracker that keeps what it gets. As for tensorboard, settings must be plain values."""

    name, requires_logging_directory, main_process_only = "notes", True, True
    runs: ClassVar[list[tuple[str, dict[str, Any], list[int | None]]]] = []
    finished: ClassVar[list[str]] = []

    def __init__(self, run_name: str, logging_dir: str, **_: Any) -> None:
        super().__init__()
        self.run_name = run_name

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        assert all(isinstance(value, int | float | str | bool) for value in values.values())
        self.runs.append((self.run_name, values, []))

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.runs[-1][2].append(step)

    def finish(self) -> None:
        self.finished.append(self.run_name)


@pytest.mark.usefixtures("no_pictures")
def test_a_tracker_gets_settings_and_metrics(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pruning, and of a recovery."""
    monkeypatch.setattr(processes, "get_available_trackers", lambda: ["notes"])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notes", Notes)
    passed(prune(tiny_model, tiny_text, tmp_path / "out", "--tracker", "notes"))
    passed(invoke("recover", tmp_path / "out", "-o", tmp_path / "more", "--tokens", "32", "--tracker", "notes"))
    assert [(name, steps) for name, _, steps in Notes.runs] == [
        ("ddp-vllm", [1, 2, 3, 4, 5, 6]), ("ddp-vllm-recover", [1])
    ]  # fmt: skip
    assert Notes.runs[0][1]["alm.mu_start"] == 0.5 and Notes.runs[1][1]["tokens"] == 32
    assert Notes.finished == [name for name, _, _ in Notes.runs]
