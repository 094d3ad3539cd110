"""What vLLM is told at start, and what it does where the plugin does not suit it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import PROMPTS
from tiny_models import SIZES, generate, save_random
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.vllm
Run = Callable[..., str]
REGISTER = """
import sys
from ddp_plugins.register import register
register(); register()
print("ddp_plugins.dense" in sys.modules)
import torch
from transformers import AutoConfig
from vllm import ModelRegistry
from vllm.config import model
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS
from ddp_vllm.remote_code.configuration_ddp import CONFIGS
refused = []
for config in CONFIGS:
    assert type(AutoConfig.for_model(config.model_type)) is config
    assert config.__name__.replace("Config", "ForCausalLM") in ModelRegistry.get_supported_archs()
    ours, dense = config.model_type, config.model_type.removeprefix("ddp_")
    assert model._is_valid_dtype(ours, torch.float16) == model._is_valid_dtype(dense, torch.float16), ours
    if dense in MODEL_ARCH_CONFIG_CONVERTORS:
        assert issubclass(MODEL_ARCH_CONFIG_CONVERTORS[ours], MODEL_ARCH_CONFIG_CONVERTORS[dense]), ours
    assert config.__name__.removeprefix("DDP").replace("Config", "ForCausalLM") not in MODELS_CONFIG_MAP, ours
    refused += [ours] * (not model._is_valid_dtype(ours, torch.float16))
print(*refused)
"""


def test_register_twice_names_every_family_and_imports_no_model_class(run_in_vllm: Run) -> None:
    """What vLLM knows of a dense type also holds for its pruned one.

    Of an architecture it must know nothing: the entry of a dense family is our `Limits`, which would hide vLLM's.
    """
    assert run_in_vllm(REGISTER).strip().splitlines()[-2:] == ["False", "ddp_gemma2 ddp_gemma3_text"]


MASKS = """
import torch
from types import SimpleNamespace
from ddp_plugins.any_model import WidthsConfig
from ddp_plugins.loading import CheckedLoading

kept = ["model.layers.0.mlp.gates.weight", "model.attn.gates", "attn.proj.weight", "mlpgates"]
masks = [f"{kind}.{name}" for kind in ("attn", "mlp", "experts") for name in ("gates", "z", "saliency")]
config = {"layers_module": "model.layers", "mlp": {"inputs": ["mlp.up"], "output": "mlp.down", "intermediate_size": 8}}
config = WidthsConfig.from_config({"quant_method": "ddp_widths", **config, "layers": [{"intermediate_size": 5}]})
print(config.get_checkpoint_weight_mapper().apply_list(masks + kept) == kept)
tensors = [(name, torch.zeros(1)) for name in masks]
print(list(CheckedLoading._checked(SimpleNamespace(), tensors, set())) == [])
"""


def test_a_loader_that_reads_every_file_loads_no_masks(run_in_vllm: Run) -> None:
    """As --load-format runai_streamer does, which needs a package of its own."""
    assert run_in_vllm(MASKS).split()[-2:] == ["True", "True"]


BROKEN = """
import json, logging, sys
from vllm.config import model
from ddp_plugins import register

warnings = []
register.logger.addFilter(lambda record: warnings.append(record.getMessage()) or True)
names = model._FLOAT16_NOT_SUPPORTED_MODELS
del model._FLOAT16_NOT_SUPPORTED_MODELS
register.register()
model._FLOAT16_NOT_SUPPORTED_MODELS = names
sys.modules["ddp_plugins.limits"] = None  # not to be imported

from vllm import LLM, ModelRegistry, SamplingParams
engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=192, skip_tokenizer_init=True,
             kv_cache_memory_bytes=1 << 26, num_gpu_blocks_override=16)
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
tokens = [list(answer.outputs[0].token_ids) for answer in engine.generate(prompts, greedy)]
ours = [name for name in ModelRegistry.get_supported_archs() if name.startswith("DDP")]
print("RESULT", json.dumps({"tokens": tokens, "warnings": warnings, "ours": ours}))
"""


def test_where_the_plugin_is_broken_stock_models_are_served_as_ever(run_in_vllm: Run, tmp_path: Path) -> None:
    """Once with a name of vLLM's gone, then with a module of ours that vLLM's own loading of plugins meets."""
    stock = save_random(tmp_path, LlamaForCausalLM, LlamaConfig(**SIZES, num_hidden_layers=2))
    found = json.loads(run_in_vllm(BROKEN, tmp_path, json.dumps(PROMPTS)).partition("RESULT")[2].splitlines()[0])
    assert found["tokens"] == [generate(stock, prompt)["tokens"] for prompt in PROMPTS]
    assert found["ours"] == []
    for warning, cause in zip(found["warnings"], ("_FLOAT16_NOT_SUPPORTED_MODELS", "ddp_plugins.limits"), strict=True):
        assert warning.startswith("ddp-vllm could not register its models") and cause in warning
        assert "\n" not in warning
