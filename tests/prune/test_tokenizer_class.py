"""A pruned folder tokenises as its dense model does, whatever class tokenizer_config.json states."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from ddp_prune.export import export
from ddp_prune.gates import unit_shapes
from ddp_prune.source import open_source

TEXT = "The quick  brown fox,\n number 12's  lazy dog."


@pytest.mark.parametrize("stated", ["", "LlamaTokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_same_tokens(model_type: str, stated: str, tiny_model: Path, tmp_path: Path) -> None:
    """transformers sets some stated classes aside for model types it knows; it does not know ours."""
    dense = Path(shutil.copytree(tiny_model, tmp_path / "dense"))
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    path = dense / "tokenizer_config.json"
    settings = {key: value for key, value in json.loads(path.read_text()).items() if key != "tokenizer_class"}
    path.write_text(json.dumps({**settings, "tokenizer_class": stated} if stated else settings))
    source = open_source(str(dense))
    gates = {kind: torch.ones(shape) for kind, shape in unit_shapes(source.sizes, "kv-group").items()}
    export(source, gates, tmp_path / "pruned", head_unit="kv-group", provenance={})
    expected = AutoTokenizer.from_pretrained(dense)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "pruned", trust_remote_code=True)
    assert type(tokenizer) is type(expected)
    assert tokenizer(TEXT)["input_ids"] == expected(TEXT)["input_ids"]
    assert tokenizer.eos_token_id == expected.eos_token_id == 0
