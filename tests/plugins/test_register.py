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
        assert MODEL_ARCH_CONFIG_CONVERTORS[ours] is MODEL_ARCH_CONFIG_CONVERTORS[dense], ours
    assert config.__name__.removeprefix("DDP").replace("Config", "ForCausalLM") not in MODELS_CONFIG_MAP, ours
    refused += [ours] * (not model._is_valid_dtype(ours, torch.float16))
print(*refused)
"""


@pytest.mark.vllm
def test_register_twice_names_every_family_and_imports_no_model_class() -> None:
    """What vLLM knows of a dense type also holds for its pruned one.

    Of an architecture it must know nothing: the entry of a dense family is our `Limits`, which would hide vLLM's.
    """
    assert run_python(REGISTER).strip().splitlines()[-2:] == ["False", "ddp_gemma2 ddp_gemma3_text"]
