"""The public names: which there are, that they load nothing before they are used, and that their page says the same."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_vllm
from ddp_vllm import api


def test_the_public_names_are_these() -> None:
    """Whoever takes one away breaks programs; whoever adds one adds it here."""
    assert ddp_vllm.__all__ == [
        "prune", "prune_sizes", "plan", "recover", "apply", "quantize", "study", "export_gguf", "read",
        "inspect", "verify", "publish", "report", "profile", "bench", "evaluate", "evaluate_text", "compare",
        "fetch_model", "fetch_conversations", "Checkpoint", "DdpError",
    ]  # fmt: skip
    functions = {name for name, each in vars(api).items() if getattr(each, "__module__", "") == api.__name__}
    assert {name for name in functions if not name.startswith("_")} == {*ddp_vllm.__all__} - {*ddp_vllm._ELSEWHERE}
    assert all(getattr(ddp_vllm, name).__doc__ for name in ddp_vllm.__all__) and set(ddp_vllm.__all__) < {
        *dir(ddp_vllm)
    }
    with pytest.raises(AttributeError, match="no attribute 'prnue'"):
        ddp_vllm.prnue  # noqa: B018


def test_every_path_may_be_a_text_or_a_path() -> None:
    """Of each function, the arguments that are a folder, a file, or a model, which may be either."""
    places = ("model", "output", "recipe", "masks", "folder", "folders", "results", "dense", "pruned", "texts", "test")
    for name in ddp_vllm.__all__:
        function = getattr(ddp_vllm, name)
        for each in inspect.signature(function).parameters.values() if inspect.isfunction(function) else ():
            kind = str(each.annotation)
            both = "PathLike" in kind or ("str" in kind and "Path" in kind)
            assert both or each.name not in places, f"{name}({each.name}: {kind})"


def test_importing_loads_nothing_heavy() -> None:
    heavy = ("torch", "vllm", "transformers", "datasets", "accelerate", "rich", "numpy", "click")
    code = f"import sys, ddp_vllm; ddp_vllm.prune; print(*sys.modules.keys() & set({heavy!r}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_types_are_for_all() -> None:
    assert Path(ddp_vllm.__file__).with_name("py.typed").exists()
