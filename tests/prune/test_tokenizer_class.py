"""A pruned folder tokenizes as its dense model does, whatever class tokenizer_config.json states."""

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import edit_json, export_whole
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, MistralConfig, PreTrainedTokenizerFast

from ddp_prune.masks_file import write_masks
from ddp_prune.models.source import open_source
from ddp_vllm.families import unit_shapes
from ddp_vllm.remote_code.modeling_deepseek import DeepseekConfig, register_deepseek

TEXT = "The quick  brown fox,\n number 12's  lazy dog."


@pytest.mark.parametrize("stated", ["", "LlamaTokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_the_same_tokens(model_type: str, stated: str, tiny_model: Path, tmp_path: Path) -> None:
    """transformers sets some stated classes aside for model types it knows; it does not know ours."""
    dense = Path(shutil.copytree(tiny_model, tmp_path / "dense"))
    config = json.loads((dense / "config.json").read_text())
    made = AutoConfig.for_model(
        model_type, **{name: config[name] for name in config.keys() - {"model_type", "architectures"}}
    )
    AutoModelForCausalLM.from_config(made).save_pretrained(dense)
    path = dense / "tokenizer_config.json"
    settings = {key: value for key, value in json.loads(path.read_text()).items() if key != "tokenizer_class"}
    path.write_text(json.dumps({**settings, "tokenizer_class": stated} if stated else settings))
    export_whole(open_source(str(dense)), tmp_path / "pruned")
    expected = AutoTokenizer.from_pretrained(dense)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "pruned", trust_remote_code=True)
    assert type(tokenizer) is type(expected)
    assert tokenizer(TEXT)["input_ids"] == expected(TEXT)["input_ids"]
    assert tokenizer.eos_token_id == expected.eos_token_id == 0


def _deepseek(tiny_model: Path, folder: Path) -> Path:
    """A folder as DeepSeekMoE-16B is published: with the names of Python files, and of a class for its tokenizer."""
    register_deepseek()
    config = DeepseekConfig(
        vocab_size=320, hidden_size=32, intermediate_size=40, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, n_routed_experts=4, num_experts_per_tok=2, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in tiny_model.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    code = {"AutoConfig": "configuration_deepseek.DeepseekConfig"}
    edit_json(folder / "config.json", auto_map=code)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    return folder


FRESH = """
import json, sys
from pathlib import Path
from ddp_prune.export import apply_masks
from ddp_prune.models.source import open_source
from ddp_prune.text.tokens import load_tokenizer
dense, masks, pruned, text = sys.argv[1:]
tokenizer = load_tokenizer(str(open_source(dense).folder))
apply_masks(dense, Path(masks), Path(pruned), overwrite=False)
print(json.dumps(tokenizer(text)["input_ids"]))
"""


@pytest.mark.nightly
def test_the_tokens_of_deepseek_are_those_of_its_file(tiny_model: Path, tmp_path: Path) -> None:
    """transformers does not know its type, so it would take the class that is stated, which drops the blanks.

    In a process of its own, as here the type is known already; a question there would get no answer.
    """
    dense, masks, pruned = _deepseek(tiny_model, tmp_path / "dense"), tmp_path / "masks", tmp_path / "pruned"
    source = open_source(str(dense))
    gates = {kind: torch.ones(shape) for kind, shape in unit_shapes(source.sizes, "auto").items()}
    write_masks(gates, masks, head_unit="auto", provenance={})
    command = [sys.executable, "-c", FRESH, *map(str, (dense, masks, pruned)), TEXT]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    expected = PreTrainedTokenizerFast(tokenizer_file=str(tiny_model / "tokenizer.json"))(TEXT)["input_ids"]
    assert json.loads(result.stdout) == expected
    for folder in (dense, pruned):
        assert AutoTokenizer.from_pretrained(folder, trust_remote_code=folder == pruned)(TEXT)["input_ids"] == expected


def _tekken(path: Path) -> int:
    """Write a tokenizer in Mistral's own format, and return the size of its vocabulary."""
    words = [bytes([byte]) for byte in range(256)] + [b" t", b"he", b" q", b"ui", b"ck"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": word.decode("latin1")}
        for rank, word in enumerate(words)
    ]
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(SPECIAL)]
    sizes = {"default_vocab_size": len(words) + len(SPECIAL), "default_num_special_tokens": len(SPECIAL)}
    config = {"pattern": r"[^\s]+|\s+", "num_vocab_tokens": len(words), **sizes, "version": "v3"}
    path.write_text(json.dumps({"config": config, "vocab": vocabulary, "special_tokens": special}))
    return len(words) + len(SPECIAL)


SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"),
]


def test_a_mistral_with_tekken_alone_keeps_its_tokens(tmp_path: Path) -> None:
    """transformers chooses the class by model type, and has none for ours: the pruned folder lost its BOS."""
    pytest.importorskip("mistral_common")
    (tmp_path / "dense").mkdir()
    config = MistralConfig(
        vocab_size=_tekken(tmp_path / "dense" / "tekken.json"), hidden_size=32, intermediate_size=40, head_dim=8,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, sliding_window=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    export_whole(open_source(str(tmp_path / "dense")), tmp_path / "pruned")
    expected = AutoTokenizer.from_pretrained(tmp_path / "dense")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "pruned", trust_remote_code=True)
    assert type(tokenizer).__name__ == type(expected).__name__ == "MistralCommonBackend"
    ids = expected("the quick")["input_ids"]
    assert tokenizer("the quick")["input_ids"] == ids and ids[0] == 1
