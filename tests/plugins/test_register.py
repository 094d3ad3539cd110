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
