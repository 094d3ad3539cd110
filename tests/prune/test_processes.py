"""Two processes (gloo, on a CPU) learn what one does, with whole weights and with weights cut over them."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM, MixtralConfig, MixtralForCausalLM
from two_processes import BLOCKS, SETTINGS

from ddp_prune.devices import check_shares, free_memory, load_sharded
from ddp_prune.gates import GatedModel
from ddp_prune.model import load_model, open_source
from ddp_prune.recipe import Recipe
from ddp_prune.run_state import RunState
from ddp_prune.train import train
from ddp_prune.trainer import Learned
from ddp_vllm.cli import main
from ddp_vllm.errors import ModelError, SettingError

ROOT = Path(__file__).parent.parent.parent
PRUNE = ["--sparsity", "0.4", "--steps", "6", "--batch-size", "4", "--seq-len", "16"]
TOGETHER = 1e-6  # sums over processes are made in another order, in float64
RECIPE = "micro_batch_size = 1\n"  # a product of other shapes, or of more threads, is rounded otherwise


def _launch(folder: Path, *arguments: str) -> list[tuple[int, str, str]]:
    """Run a command in two processes as torchrun does, and return exit code, stdout and stderr of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in ("0", "1"):
        environment = os.environ | {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DDP_VLLM_CACHE": str(folder / "cache"),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'prune'}",
        }  # fmt: skip
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, *arguments], env=environment, cwd=folder, **streams))
    try:
        said = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *streams) for process, streams in zip(started, said, strict=True)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As the two processes have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral with five experts, which two processes cannot cut evenly and which are stacked as they are read."""
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=320, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, num_local_experts=5, num_experts_per_tok=2, eos_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["dense", "experts"])
def learned(
    request: pytest.FixtureRequest, tiny_model: Path, experts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Learned, Path]:
    """What one process learns, and the folder of what two learned."""
    model = tiny_model if request.param == "dense" else experts
    folder = tmp_path_factory.mktemp("two")
    for code, _, stderr in _launch(folder, str(Path(__file__).with_name("two_processes.py")), str(model), str(folder)):
        assert code == 0, stderr
    source, recipe = open_source(str(model)), Recipe(model=str(model), **SETTINGS)
    gated = GatedModel(
        load_model(source, "float32"), source.family, source.sizes, "auto" if source.sizes.num_experts else "query-head"
    )
    return train(gated, BLOCKS, recipe, Accelerator(), RunState(folder / "one", recipe), lambda _: None), folder


@pytest.mark.parametrize("name", ["whole", "cut", "cut-again", "resumed"])
def test_masks_are_those_of_one_process(name: str, learned: tuple[Learned, Path]) -> None:
    """With weights whole, cut, cut and with checkpointed layers, and interrupted between two saves."""
    one, folder = learned
    two = load_file(folder / name)
    for kind, gates in one.gates.items():
        assert torch.equal(two[kind] > 0, gates > 0), kind
        torch.testing.assert_close(two[kind], gates, atol=TOGETHER, rtol=0)
        assert ((gates != 1) & (gates > 0)).any()  # something was learned
    for kind, counts in one.routed.items():
        assert torch.equal(two[f"{kind}.counts"], counts) and counts.sum() > 0


def test_all_go_on_where_the_main_process_was(learned: tuple[Learned, Path]) -> None:
    """Process 1 finds no run on its own disk, and writes none."""
    _, folder = learned
    for rank in (0, 1):
        facts = json.loads((folder / f"facts-{rank}.json").read_text())
        assert facts["world"] == 2
        assert [step for name, step in facts["steps"] if name == "resumed"] == [*range(1, 6), *range(4, 13)]
    assert (folder / "machine-0" / "resumed.run" / "state.safetensors").exists()
    assert not (folder / "machine-1").exists()


def test_each_process_holds_its_share_of_every_layer_and_the_head(
    learned: tuple[Learned, Path], tiny_model: Path, experts: Path
) -> None:
    _, folder = learned
    model = experts if learned[0].routed else tiny_model
    whole = {name: value.nbytes for name, value in load_model(open_source(str(model)), "float32").named_parameters()}
    shares = [json.loads((folder / f"facts-{rank}.json").read_text())["bytes"] for rank in (0, 1)]
    assert shares[0].keys() == shares[1].keys() == whole.keys()
    for name, num_bytes in whole.items():
        mine, others = shares[0][name], shares[1][name]
        if ".layers." in name:
            assert mine + others == num_bytes, name
            assert max(mine, others) <= 0.6 * num_bytes, name  # 3 and 2 of five experts at worst
        else:
            assert mine == others == num_bytes, name


def test_what_one_process_meets_ends_all(learned: tuple[Learned, Path]) -> None:
    for rank in (0, 1):
        assert json.loads((learned[1] / f"facts-{rank}.json").read_text())["error"] == (
            "only process 1 cannot read its text"
        )


def test_the_command_line_in_two_processes(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """One run, one report and one checkpoint, and its masks are those of one process with whole weights."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = ["--recipe", str(tmp_path / "recipe.toml")]
    arguments = ["prune", str(tiny_model), *PRUNE, *recipe, "--data", str(tiny_text), "-o"]
    (first, out, err), (second, silence, _) = _launch(
        tmp_path, "-m", "ddp_vllm", *arguments, str(tmp_path / "two"), "--shard"
    )
    assert first == second == 0, err
    assert "polish 6/6" in out and "vllm serve" in out and silence == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "recipe.toml", "two"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_VLLM_CACHE", str(tmp_path / "cache"))
        result = CliRunner().invoke(main, [*arguments, str(tmp_path / "one")])
    assert result.exit_code == 0, result.output
    one, two = (load_file(tmp_path / name / "ddp_masks.safetensors") for name in ("one", "two"))
    for name in ("attn.gates", "mlp.gates"):
        assert torch.equal(one[name] > 0, two[name] > 0)
        torch.testing.assert_close(one[name], two[name], atol=TOGETHER, rtol=0)
    lines = (tmp_path / "two" / "ddp_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_a_failure_is_one_line_and_the_exit_code_of_both(tiny_model: Path, tmp_path: Path) -> None:
    """Process 0 reads the text first and fails alone; process 1 has not looked at it yet."""
    (tmp_path / "short.txt").write_text("Too short.", encoding="utf-8")
    arguments = ["prune", str(tiny_model), *PRUNE, "--data", "short.txt", "-o", "out"]
    (first, _, line), (second, out, silence) = _launch(tmp_path, "-m", "ddp_vllm", *arguments)
    assert first == second == 4
    assert line.startswith("ddp-vllm: short.txt holds") and line.count("\n") == 1, line
    assert out == silence == ""
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.run").exists()


def test_weights_are_cut_over_several_processes_with_equal_batches() -> None:
    with pytest.raises(SettingError, match="there is one; start with: accelerate launch"):
        check_shares(16, 1)
    with pytest.raises(SettingError, match=r"batch_size is 10, which 4 processes .* make it 12"):
        check_shares(10, 4)
    check_shares(16, 8)


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_cut_model_is_the_model_that_is_loaded_whole(group_of_one: None, tmp_path: Path) -> None:
    """Gemma-2's cap on scores, so tight that it shows, and float16, which is learned on in bfloat16."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=320, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, attn_logit_softcapping=0.5, initializer_range=0.5, query_pre_attn_scalar=1,
    )  # fmt: skip
    Gemma2ForCausalLM(config).half().save_pretrained(tmp_path / "gemma")
    source = open_source(str(tmp_path / "gemma"))
    for dtype, used in (("auto", torch.bfloat16), ("float32", torch.float32)):
        whole, cut = load_model(source, dtype), load_sharded(source, dtype, torch.device("cpu"), 1)
        assert cut.config._attn_implementation == whole.config._attn_implementation == "eager"
        assert {parameter.dtype for parameter in cut.parameters()} == {used} == {whole.dtype}
        with torch.no_grad():
            capped = whole(BLOCKS).logits
            assert torch.equal(cut(BLOCKS).logits, capped)
    whole.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert (whole(BLOCKS).logits - capped).abs().max() > 0.1
    weights = load_file(tmp_path / "gemma" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "gemma" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight.*1 weights in all"):
        load_sharded(open_source(str(tmp_path / "gemma")), "auto", torch.device("cpu"), 1)


def test_free_memory_where_host_and_device_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What accelerate answers on a Mac, and elsewhere."""
    monkeypatch.setattr(processes, "CONTROL_GROUP", Path("/nowhere"))
    for answer in ({"mps": 1000}, {"cpu": 1000}, {0: 5, "cpu": 1000}):
        monkeypatch.setattr(processes, "get_max_memory", lambda answer=answer: answer)
        assert free_memory(Accelerator(cpu=True)) == 1000


@pytest.mark.parametrize(("limit", "free"), [("max", 1000), ("700", 500), ("5000", 1000), ("100", 0)])
def test_free_memory_in_a_container(limit: str, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 100\n")
    monkeypatch.setattr(processes, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(processes, "get_max_memory", lambda: {"cpu": 1000})
    assert free_memory(Accelerator(cpu=True)) == free
