"""Models that other tools pruned: converted, they say what the tool's own forward pass says, in every runtime."""

import json
import tracemalloc
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, invoke, passed
from foreign_folders import BLOCKS, FOLDERS, llama, pruned
from safetensors.torch import load_file, save_file
from serving import Serve, assert_same, job
from test_gguf import furthest, save_tokenizer
from test_gguf import serve as llama_cpp
from tiny_experts import FAMILIES, SIZES, make_expert_checkpoint
from tiny_models import PROMPTS, edit_config, edit_weights, generate, load_model
from tokenizers import pre_tokenizers
from transformers import LlamaConfig

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.conversion.formats import opened_in_place
from ddp_vllm.errors import ModelError


def output_of(*words: object) -> str:
    return passed(invoke(*words)).output


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, Any]]:
    """Return a function that gives a tool's folder, what convert makes of it, and the model as the tool has it."""
    root, made = tmp_path_factory.mktemp("converted"), dict[str, tuple[Path, Path, Any]]()

    def get(tool: str) -> tuple[Path, Path, Any]:
        if tool == "Torch-Pruning":
            pytest.importorskip("torch_pruning", reason="not installed; the extra dev brings it")
        if tool not in made:
            model = FOLDERS[tool](root / tool)
            save_tokenizer(root / tool, pre_tokenizers.ByteLevel(add_prefix_space=False))
            passed(invoke("convert", root / tool, "-o", root / f"{tool}-converted"))
            made[tool] = root / tool, root / f"{tool}-converted", model
        return made[tool]

    return get


@pytest.mark.parametrize("tool", FOLDERS)
def test_greedy_tokens_are_those_of_the_tools_own_forward_pass(tool: str, converted: Any) -> None:
    _, folder, model = converted(tool)
    ours = load_model(folder)
    for prompt in PROMPTS:
        ids, said = torch.tensor([prompt]), generate(ours, prompt)
        torch.testing.assert_close(ours(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
        for step, token in enumerate(said["tokens"]):  # some tools' models have no cache that counts right
            before = torch.tensor([prompt + said["tokens"][:step]])
            assert model(before).logits[0, -1].argmax().item() == token


IN_PLACE = ("Puzzletron", "Nemotron-NAS", "AnyModel")


@pytest.fixture(scope="session")
def served(serve: Serve, converted: Any) -> dict[str, Any]:
    """Return what real vLLM answers on each converted folder, and on those that it opens as they are."""
    tools = [tool for tool in FOLDERS if tool != "Torch-Pruning" or find_spec("torch_pruning")]
    jobs = {tool: job(converted(tool)[1]) for tool in tools}
    return serve(jobs | {f"{tool} in place": job(converted(tool)[0]) for tool in IN_PLACE})


@pytest.mark.vllm
@pytest.mark.parametrize("case", [*FOLDERS, *(f"{tool} in place" for tool in IN_PLACE)])
def test_vllm_serves_what_transformers_computes(case: str, served: dict[str, Any], converted: Any) -> None:
    ours = load_model(converted(case.removesuffix(" in place"))[1])
    assert_same(served[case], {"outputs": [generate(ours, prompt) for prompt in PROMPTS]})


@pytest.mark.parametrize("tool", FOLDERS)
def test_llama_cpp_computes_what_transformers_computes(tool: str, converted: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    passed(invoke("export", converted(tool)[1], "--outtype", "f32", "-o", file))
    assert furthest(load_model(converted(tool)[1]), llama_cpp(file)) < 1e-3


@pytest.mark.parametrize("tool", FOLDERS)
def test_tensors_are_copied_and_other_verbs_read_the_folder(tool: str, converted: Any, tmp_path: Path) -> None:
    source, folder, _ = converted(tool)
    before, after = (
        {name: tensor for file in sorted(each.rglob("*.safetensors")) for name, tensor in load_file(file).items()}
        for each in (source, folder)
    )
    left_out = {"model.layers.2.input_layernorm.weight", "model.layers.3.post_attention_layernorm.weight"}
    assert before.keys() - after.keys() == (left_out if tool == "AnyModel" else set())
    assert all(torch.equal(before[name], after[name]) for name in before.keys() & after.keys())
    added = after.keys() - before.keys()
    assert {name.rpartition(".")[2] for name in added} == ({"bias"} if tool == "FLAP" else set())
    assert not any(after[name].any() for name in added)
    assert f"those of {tool}, which another tool pruned" in output_of("inspect", folder)
    assert json.loads(output_of("inspect", folder, "--json"))["recipe"] is None
    card = (folder / "README.md").read_text()
    assert f"converted its folder {tool} and" in card and "masks" not in card.partition("## Load")[0]
    passed(invoke("verify", folder))
    passed(invoke("push", folder, "me/x", "--dry-run"))
    assert "masks" not in Path(output_of("report", folder, "-o", tmp_path).split()[-1]).read_text()
    result = invoke("apply", source, "--masks", folder / "ddp_masks.safetensors", "-o", tmp_path / "applied")
    assert_refused(result, result.exit_code)
    assert result.exit_code in (3, 7)


def test_transformers_own_parser_reads_the_widths(converted: Any) -> None:
    """Our folders state them in its format too, for a transformers and a vLLM that build such layers themselves."""
    folder = converted("AnyModel")[1]
    config = json.loads((folder / "config.json").read_text())
    assert config["base_architecture"] == "LlamaForCausalLM"
    stock = LlamaConfig.from_dict({**config, "model_type": "llama"})
    for (heads, kv_heads, width), layer in zip(BLOCKS, stock.per_layer_config, strict=True):
        assert layer.skip == [*["attention"] * (not heads), *["mlp"] * (not width)]
        assert not heads or (layer.num_attention_heads, layer.num_key_value_heads) == (heads, kv_heads)
        assert not width or layer.intermediate_size == width
    own = load_model(folder).config
    assert own.intermediate_size == 64 and own.per_layer_config[1].num_key_value_heads == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_different_widths(family: str, tmp_path: Path) -> None:
    """As MoE-Slimming leaves them. What such folders say in transformers and vLLM is tested in test_moe.py."""
    make_expert_checkpoint(tmp_path / "model", family)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    layers = config.pop("ddp_layers")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": family}))
    passed(invoke("convert", tmp_path / "model", "-o", tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["ddp_layers"] == layers


def test_typed_blocks_of_a_mixture_of_experts() -> None:
    """As newer Puzzletrons write them; expert widths by layer, a window in one layer as the model has it."""
    attention = {"kind": "attention", "num_query_heads": 2, "num_kv_heads": 1, "sliding_window_size": "full"}
    moe = {"kind": "moe", "num_experts": 8, "top_k": 3, "expert_intermediate_size": 40}
    ffn = {"kind": "ffn", "intermediate_size": 96, "hidden_act": "silu"}
    blocks = [{"subblock_configs": [attention, part]} for part in (moe, ffn, {**moe, "expert_intermediate_size": 64})]
    config = {"model_type": "qwen3_moe", "hidden_act": "silu", **SIZES, **FAMILIES["qwen3_moe"]}
    opened = opened_in_place({**config, "architectures": ["AnyModel"], "block_configs": blocks})
    assert opened and opened["architectures"] == ["DDPQwen3MoeForCausalLM"]
    assert [layer.get("expert_intermediate_sizes") for layer in opened["ddp_layers"]] == [[40] * 8, None, [64] * 8]
    with pytest.raises(ModelError, match="layer 0 has 'num_experts' of its own"):
        moe["num_experts"] = 6
        opened_in_place({**config, "block_configs": blocks})
    assert opened_in_place(config) is None


def test_a_converted_model_recovers(converted: Any, tmp_path: Path) -> None:
    """Although there are no masks to carry on; afterwards it still says where it is from."""
    llama(num_key_value_heads=12).save_pretrained(tmp_path / "dense")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"the fox {n} jumps"}) + "\n" for n in range(400)))
    passed(invoke("convert", converted("FLAP")[0], "-o", tmp_path / "out", "--dense", tmp_path / "dense"))
    words = ("--tokens", "256", "--seq-len", "16", "--batch-size", "2", "--data", tmp_path / "text.jsonl")
    passed(invoke("recover", tmp_path / "out", "-o", tmp_path / "recovered", *words))
    assert read_checkpoint(tmp_path / "recovered").provenance["converted"]["from"] == "FLAP"
    assert "those of FLAP, which another tool pruned; then all" in output_of("inspect", tmp_path / "recovered")


def test_the_dense_model_gives_the_sizes_before_pruning(converted: Any, tmp_path: Path) -> None:
    source = converted("AnyModel")[0]
    llama(intermediate_size=80, num_key_value_heads=6).save_pretrained(tmp_path / "dense")
    passed(invoke("convert", source, "-o", tmp_path / "out", "--dense", tmp_path / "dense"))
    checkpoint = read_checkpoint(tmp_path / "out")
    assert (checkpoint.config["intermediate_size"], checkpoint.config["num_key_value_heads"]) == (80, 6)
    assert checkpoint.provenance["applied_to"] == "dense" and "dense sizes from dense" in output_of(
        "inspect", tmp_path / "out"
    )


def test_a_large_folder_is_copied_in_pieces(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    pruned(folder, vocab_size=1_000_000)
    size = sum(file.stat().st_size for file in folder.iterdir())
    tracemalloc.start()
    passed(invoke("convert", folder, "-o", tmp_path / "out"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6 < 300e6 < size


Q, K, GATE, DOWN = (f"model.layers.1.{name}.weight" for name in (
    "self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"
))  # fmt: skip


def weights(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_weights(folder, edit)


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, lambda found: found.update(values))


def cut(name: str, length: int) -> Callable[[dict[str, torch.Tensor]], None]:
    axis = int(name.endswith(("down_proj.weight", "o_proj.weight")))
    return lambda found: found.update({name: found[name].narrow(axis, 0, length).contiguous()})


def heads(queries: int, kv_heads: int, layers: Sequence[int] = (1,)) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(found: dict[str, torch.Tensor]) -> None:
        for layer in layers:
            for name, count in (("q", queries), ("k", kv_heads), ("v", kv_heads), ("o", queries)):
                cut(f"model.layers.{layer}.self_attn.{name}_proj.weight", 32 * count)(found)

    return edit


def both(first: Callable[[Path], None], second: Callable[[Path], None]) -> Callable[[Path], Any]:
    return lambda folder: (first(folder), second(folder))


def block(**part: Any) -> Callable[[Path], None]:
    whole = {"attention": {"num_key_value_heads": 4}, "ffn": {"intermediate_size": 64}}
    own = {**whole, "ffn": {"intermediate_size": 40}}
    return config(block_configs=[whole, {**own, **part}, whole, whole])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def norms_alone(found: dict[str, torch.Tensor]) -> None:
    for name in [name for name in found if name.startswith("model.layers.1.mlp.")]:
        del found[name]
    found["model.layers.1.mlp.down_proj.bias"] = torch.ones(48)


def twice(folder: Path) -> None:
    save_file({Q: torch.zeros(3, 3)}, folder / "model-2.safetensors")


REFUSED: dict[str, tuple[Callable[[Path], Any], list[str]]] = {  # how a folder is made unfit, what the line says
    "gate and up differ": (weights(cut(GATE, 39)), ["layer 1: mlp.gate_proj has 39 rows", "40"]),
    "keys and values differ": (weights(cut(K, 96)), ["self_attn.", "_proj has", "96"]),
    "no whole heads": (weights(cut(f"{Q[:-13]}o_proj.weight", 100)), ["o_proj has 100 columns", "3.125 heads of 32"]),
    "groups with two readings": (weights(heads(5, 2)), ["5 query heads for 2 KV heads", "[3, 2]", "[2, 3]"]),
    "heads with two readings": (
        both(weights(heads(6, 2, range(4))), config(head_dim=None, hidden_size=48)),
        ["head_dim", "--dense"],
    ),
    "a matrix is missing": (weights(lambda found: found.pop(GATE)), ["layer 1 lacks mlp.gate_proj.weight"]),
    "other names": (
        weights(lambda found: [found.update({f"x.{name}": found.pop(name)}) for name in [*found]]),
        ["names like 'x.", "model.layers.0"],
    ),
    "more layers than stated": (config(num_hidden_layers=3), ["of layer 3", "3 layers"]),
    "a config that lies": (config(per_layer_config={"1": {"intermediate_size": 41}}), ["layer 1 has", "40", "states"]),
    "a hidden size that lies": (config(hidden_size=96), ["has shape", "requires"]),
    "nothing is pruned": (
        weights(lambda found: [found.update({name: found[name.replace(".1.", ".0.")].clone()}) for name in [*found]]),
        ["vLLM serves it as it is"],
    ),
    "a bias without a place": (
        both(
            weights(lambda found: found.update({f"{Q[:-13]}o_proj.bias": torch.ones(48)})), config(model_type="mistral")
        ),
        ["self_attn.o_proj.bias", "mistral"],
    ),
    "a bias alone": (weights(norms_alone), ["down_proj.bias", "constant"]),
    "an unknown layer": (config(per_layer_config={"9": {}}), ["layer '9'", "4 layers"]),
    "another field": (config(per_layer_config={"1": {"sliding_window": 9}}), ["sliding_window", "of its own"]),
    "another block to skip": (config(per_layer_config={"1": {"skip": ["mamba"]}}), ["mamba", "of its own"]),
    "a linear layer for a block": (block(attention={"replace_with_linear": True}), ["replace_with_linear"]),
    "another kind of block": (block(subblock_configs=[{"kind": "mamba", "num_heads": 3}]), ["mamba"]),
    "parallel blocks": (block(parallel_blocks=[{}]), ["parallel_blocks"]),
    "a group that divides nothing": (block(attention={"n_heads_in_group": 5}), ["n_heads_in_group 5", "12 heads"]),
    "a block too few": (config(block_configs=[{}]), ["1 entries for 4 layers"]),
    "a format that is none": (config(per_layer_config=[1]), ["per_layer_config", "object"]),
    "pickles": (pickled, ["pytorch_model.bin", "python -c", "save_pretrained"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["no model*.safetensors"]),
    "a tensor twice": (twice, ["is in model", "remove one"]),
    "ours already": (config(ddp_layers=[]), ["already"]),
    "an unknown family": (config(model_type="gpt2"), ["'gpt2' is not supported"]),
    "quantized": (config(quantization_config={"quant_method": "gptq"}), ["quantized (gptq)"]),
    "the output exists": (lambda folder: folder.with_name("out").mkdir(), ["exists"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_fits_no_checkpoint_is_one_line(case: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    pruned(folder)
    spoil, words = REFUSED[case]
    spoil(folder)
    assert_refused(invoke("convert", folder, "-o", out), 5 if case == "the output exists" else 3, *words)
    assert not (out / "config.json").exists()


def test_routers_of_different_sizes_are_refused(tmp_path: Path) -> None:
    make_expert_checkpoint(tmp_path / "model", "mixtral")
    edit_config(tmp_path / "model", lambda found: (found.pop("ddp_layers"), found.update(model_type="mixtral")))
    edit_weights(tmp_path / "model", lambda found: cut("model.layers.1.block_sparse_moe.gate.weight", 6)(found))
    assert_refused(invoke("convert", tmp_path / "model", "-o", tmp_path / "out"), 3, "routers of 6 and 8 experts")


def test_biases_alone_are_a_reason_to_convert(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    name = "model.layers.1.mlp.down_proj.bias"
    edit_weights(tmp_path / "model", lambda found: found.update({name: torch.ones(48)}))
    assert "11 biases of zeros" in output_of("convert", tmp_path / "model", "-o", tmp_path / "out")
    assert read_checkpoint(tmp_path / "out").config["mlp_bias"]
