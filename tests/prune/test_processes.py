"""Two processes (gloo, on a CPU) learn what one does, with whole and with sharded weights; one outlives its terminal.

All are forks of one process that has imported what is slow to import, so they are in one file.
"""

import json
import os
import pty
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import two_processes
from accelerate import Accelerator
from commands import invoke, passed
from runs import SMALL, die_at, prune
from safetensors.torch import load_file, save_file
from seams import GatedModel, Learned, Recipe, Run, Unsaved, learn, load_model, load_sharded, open_source, pools_of
from transformers import Gemma2Config, Gemma2ForCausalLM
from two_processes import BLOCKS, SETTINGS, command_line, forking, launch, summed_gradients

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import ModelError

PRUNE = ["--sparsity", "0.4", "--steps", "6", "--batch-size", "4", "--seq-len", "16"]
TOKENS = torch.randint(1, 320, (4, 64), generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.usefixtures("no_pictures")  # in this process, not in the others
TOGETHER = 1e-6  # sums over processes are made in another order, in float64


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["dense", pytest.param("experts", marks=pytest.mark.nightly)])
def learned(
    request: pytest.FixtureRequest, tiny_model: Path, tiny_experts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Learned, Path]:
    """What one process learns, and the folder of what two learned."""
    model = tiny_model if request.param == "dense" else tiny_experts
    folder = tmp_path_factory.mktemp("two")
    for code, _, stderr in launch(folder, two_processes.learn_in_two, str(model), folder):
        assert code == 0, stderr
    source, recipe = open_source(str(model)), Recipe(model=str(model), **SETTINGS)
    gated = GatedModel(
        load_model(source, "float32"), source.widths, source.sizes, "auto" if source.sizes.num_experts else "query-head"
    )
    pools = pools_of(gated, recipe)
    return learn(gated, BLOCKS, Run.alone(recipe).schedule, pools, Accelerator(), Unsaved(), lambda _: None), folder


@pytest.mark.parametrize("name", ["sharded", "resumed", "clocks"])
def test_masks_are_those_of_one_process(name: str, learned: tuple[Learned, Path]) -> None:
    """With sharded weights and checkpointed layers, interrupted between two saves, and where process 1 chooses another
    support in the time that it has."""
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
    assert (folder / "resumed.run" / "state-0-12").exists()
    assert not (folder / "machine-1").exists()


def test_each_process_holds_its_share_of_every_layer_and_the_head(
    learned: tuple[Learned, Path], tiny_model: Path, tiny_experts: Path
) -> None:
    _, folder = learned
    model = tiny_experts if learned[0].routed else tiny_model
    num_bytes_of = {
        name: value.nbytes for name, value in load_model(open_source(str(model)), "float32").named_parameters()
    }
    shares = [json.loads((folder / f"facts-{rank}.json").read_text())["bytes"] for rank in (0, 1)]
    assert shares[0].keys() == shares[1].keys() == num_bytes_of.keys()
    for name, num_bytes in num_bytes_of.items():
        mine, others = shares[0][name], shares[1][name]
        if ".layers." in name:
            assert mine + others == num_bytes, name
            assert max(mine, others) <= 0.6 * num_bytes, name  # 3 and 2 of five experts at worst
        else:
            assert mine == others == num_bytes, name


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_sharded_gradients_are_summed_in_fp32(kind: str, tiny_model: Path, tiny_experts: Path, tmp_path: Path) -> None:
    """As one process sums those of its passes. In bfloat16 the sum of every pass would be rounded to 8 bits."""
    model = tiny_model if kind == "dense" else tiny_experts
    for code, _, stderr in launch(tmp_path, two_processes.sum_gradients, str(model), tmp_path):
        assert code == 0, stderr
    one = summed_gradients(load_model(open_source(str(model)), "bfloat16"), Accelerator(cpu=True), range(4))
    two, distances = load_file(tmp_path / "gradients"), {}
    for name, gradient in one.items():
        assert gradient.any(), name
        distances[name] = float((two[name] - gradient).norm() / gradient.norm())
    assert max(distances.values()) < 1e-5, max(distances.items(), key=lambda item: item[1])


def test_what_one_process_meets_ends_all(learned: tuple[Learned, Path]) -> None:
    for rank in (0, 1):
        assert json.loads((learned[1] / f"facts-{rank}.json").read_text())["error"] == (
            "only process 1 cannot read its text"
        )


def test_a_failure_is_one_line_and_the_exit_code_of_both(tiny_model: Path, tmp_path: Path) -> None:
    """Process 0 reads the text first and fails alone; process 1 has not looked at it yet."""
    (tmp_path / "short.txt").write_text("Too short.", encoding="utf-8")
    arguments = ["prune", str(tiny_model), *PRUNE, "--data", "short.txt", "-o", "out"]
    (first, _, line), (second, out, silence) = launch(tmp_path, command_line, *arguments)
    assert first == second == 4
    assert line.startswith("ddp-vllm: short.txt holds") and line.count("\n") == 1, line
    assert out == silence == ""
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.run").exists()


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_sharded_model_equals_the_model_loaded_whole(group_of_one: None, tmp_path: Path) -> None:
    """Gemma-2's cap on scores, so tight that it shows."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=320, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, attn_logit_softcapping=0.5, initializer_range=0.5, query_pre_attn_scalar=1,
    )  # fmt: skip
    Gemma2ForCausalLM(config).half().save_pretrained(tmp_path / "gemma")
    source = open_source(str(tmp_path / "gemma"))
    for dtype, used in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        whole, sharded = load_model(source, dtype), load_sharded(source, dtype, torch.device("cpu"), 1)
        assert sharded.config._attn_implementation == whole.config._attn_implementation == "eager"
        assert {parameter.dtype for parameter in sharded.parameters()} == {used} == {whole.dtype}
        with torch.no_grad():
            capped = whole(TOKENS).logits
            assert torch.equal(sharded(TOKENS).logits, capped)
    for layer in whole.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    with torch.no_grad():
        assert (whole(TOKENS).logits - capped).abs().max() > 0.1
    weights = load_file(tmp_path / "gemma" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "gemma" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight.*1 weights in all"):
        load_sharded(source, "auto", torch.device("cpu"), 1)


def test_a_terminal_that_is_gone_costs_no_model(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Neither in training nor in the tables after it."""
    master, slave = pty.openpty()
    words = ["prune", tiny_model, "--sparsity", "0.4", "--data", tiny_text, "-o", tmp_path / "out", "--no-proof"]
    arguments = [tmp_path / "cache", os.ttyname(slave), *map(str, words), *SMALL]
    process = forking().Process(target=two_processes.command_line_on, args=arguments)
    process.start()
    os.read(master, 1)  # its first line
    os.close(slave)
    os.close(master)
    process.join()
    assert process.exitcode == 0 and read_checkpoint(tmp_path / "out").provenance["perplexity"]


def assert_close(two: Path, one: Path) -> None:
    """Adam's first steps make a sign of the smallest gradient, and sums over processes round differently."""
    expected, found = (load_file(folder / "model.safetensors") for folder in (one, two))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=5e-4, rtol=0, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["prune", pytest.param("recover", marks=pytest.mark.nightly)])
def test_two_processes_train_as_one_does(verb: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    command = ["prune", str(tiny_model), *SMALL, "--train", "weights", "--learning-rate", "2e-4", "--sparsity", "0.4"]
    if verb == "recover":
        passed(prune(tiny_model, tiny_text, tmp_path / "pruned"))
        command = ["recover", str(tmp_path / "pruned"), "--teacher", str(tiny_model), "--train", "lora"]
        command += ["--tokens", "320", "--learning-rate", "1e-3"]
    command += ["--data", str(tiny_text), "-o"]
    passed(invoke(*command, tmp_path / "one"))
    more = ["--shard", *["--no-proof"] * (verb == "prune")]  # at night: it takes as long as the training
    (first, _, err), (second, _, _) = launch(tmp_path, command_line, *command, str(tmp_path / "two"), *more)
    assert first == second == 0, err
    assert_close(tmp_path / "two", tmp_path / "one")
    if verb == "prune":
        return
    # the weights are shared, so only the written folder has them whole
    proof = read_checkpoint(tmp_path / "two").provenance["proof"]
    assert proof["tokens"] > 100 and proof["logits"] < 1e-4 and not proof["fault"]


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit", "lora"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)], ids=str)
def test_a_run_resumes_on_another_number_of_processes(
    optimizer: str, before: int, after: int, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    train = ["--train", "lora"] if optimizer == "lora" else ["--train", "weights", "--optimizer", optimizer]
    options = ["--no-proof", "--steps", "6", "--batch-size", "4", "--seq-len", "16", "--save-every", "1"]
    options += ["--learning-rate", "2e-4"]
    command = ["prune", str(tiny_model), "--data", str(tiny_text), "--sparsity", "0.4", *options, *train, "-o"]

    def run(name: str, processes: int, stop: int = -1) -> str:
        """Run in one process as in two: with the same state of torch."""
        if processes == 2:
            (code, out, err), _ = launch(
                tmp_path, two_processes.stopped_command_line, stop, *command, str(tmp_path / name), "--shard"
            )
            assert code == (130 if stop >= 0 else 0), err
            return out
        with torch.compiler.set_stance("force_eager"):
            again = lambda: invoke(*command, tmp_path / name)  # noqa: E731
            return (die_at(stop, again) if stop >= 0 else passed(again())).output

    run("one", 1)
    run("out", before, stop=3)
    if optimizer == "adamw-8bit" and before != after:  # a scale is shared by 256 numbers of a process
        with pytest.raises(AssertionError, match=f"8-bit moments among {before} processes, not {after}; start as many"):
            run("out", after)
        return
    assert "resuming after step 3" in run("out", after)
    assert_close(tmp_path / "out", tmp_path / "one")
