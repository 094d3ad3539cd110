"""Model folders whose files try to run code when a verb reads them; the code would create a file."""

import json
from pathlib import Path

from runs import edit_json

from ddp_vllm.remote_code.__init__ import FILES

CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
pathlib.Path({ran!r}).touch()
class Config(LlamaConfig): ...
class Model(LlamaForCausalLM): ...
class Tokenizer(PreTrainedTokenizerFast): ...
def generate(model, *args, **kwargs): raise AssertionError
"""
TEMPLATE = "{{{{ cycler.__init__.__globals__.os.system('touch {ran}') }}}}{{% for m in messages %}}{{{{ m.content }}}}"
TEMPLATE += "{{% endfor %}}"
LOADABLE = ("config", "tokenizer", "generation")
"""Attacks on a model that loads without its code; the others may keep it from being loaded."""
ATTACKS = (*LOADABLE, "tokenizer class", "chat template", "index")


def make_hostile(folder: Path, attack: str, ran: Path) -> Path:
    """Change one thing of a dense or pruned folder so that whoever trusts it creates the file `ran`."""
    code = CODE.format(ran=str(ran))
    for name in ("evil", "tokenization_evil", *(file.stem for file in FILES if attack == "config")):
        (folder / f"{name}.py").write_text(code)
    if attack == "config":
        edit_json(folder / "config.json", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    elif attack.startswith("tokenizer"):
        stated = {"tokenizer_class": "EvilTokenizer"} if attack == "tokenizer class" else {}
        auto_map = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
        edit_json(folder / "tokenizer_config.json", auto_map=auto_map, **stated)
    elif attack == "generation":
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(code)
        edit_json(folder / "generation_config.json", custom_generate=str(folder))
    elif attack == "chat template":
        (folder / "chat_template.jinja").write_text(TEMPLATE.format(ran=ran))
    else:
        weights = folder / "model.safetensors"
        weights.rename(folder / "model-1.safetensors")
        (folder.parent / "model-1.safetensors").write_bytes((folder / "model-1.safetensors").read_bytes())
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "../model-1.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
