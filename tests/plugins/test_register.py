"""What vLLM is told at start, without starting vLLM."""

import subprocess
import sys

import pytest


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_entry_point_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, ddp_plugins.register; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_configs_and_their_checks_need_no_torch_of_ours() -> None:
    code = "import sys, ddp_vllm.remote_code.widths; print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


@pytest.mark.vllm
def test_register_twice_names_every_family_and_imports_no_model_class() -> None:
    code = """
import sys
from ddp_plugins.register import register
register(); register()
from transformers import AutoConfig
from vllm import ModelRegistry
from ddp_vllm.remote_code.configuration_ddp import CONFIGS
for config in CONFIGS:
    assert type(AutoConfig.for_model(config.model_type)) is config
    assert config.__name__.replace("Config", "ForCausalLM") in ModelRegistry.get_supported_archs()
print("ddp_plugins.dense" in sys.modules)
"""
    assert run_python(code).strip().splitlines()[-1] == "False"


@pytest.mark.vllm
def test_what_vllm_knows_of_a_dense_type_holds_for_its_pruned_one() -> None:
    """Of an architecture it must know nothing: the entry of a dense family is our `Limits`, which would hide vLLM's."""
    code = """
from ddp_plugins.register import register
register()
import torch
from vllm.config import model
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS
from ddp_vllm.remote_code.configuration_ddp import CONFIGS
refused = []
for config in CONFIGS:
    ours, dense = config.model_type, config.model_type.removeprefix("ddp_")
    assert model._is_valid_dtype(ours, torch.float16) == model._is_valid_dtype(dense, torch.float16), ours
    if dense in MODEL_ARCH_CONFIG_CONVERTORS:
        assert MODEL_ARCH_CONFIG_CONVERTORS[ours] is MODEL_ARCH_CONFIG_CONVERTORS[dense], ours
    assert config.__name__.removeprefix("DDP").replace("Config", "ForCausalLM") not in MODELS_CONFIG_MAP, ours
    refused += [ours] * (not model._is_valid_dtype(ours, torch.float16))
print(*refused)
"""
    assert run_python(code).strip().splitlines()[-1] == "ddp_gemma2 ddp_gemma3_text"
