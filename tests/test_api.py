"""The public names: each is where the table says."""

import inspect

import pytest

import ddp_vllm
from ddp_vllm import api


def test_every_public_name_is_where_the_table_says() -> None:
    for module, names in api.FUNCTIONS.items():
        for name in names:
            assert getattr(ddp_vllm, name).__module__ == module and getattr(ddp_vllm, name).__doc__, name
    assert sorted(name for names in api.FUNCTIONS.values() for name in names) == sorted(ddp_vllm.__all__)
    assert set(ddp_vllm.__all__) < {*dir(ddp_vllm)}
    with pytest.raises(AttributeError, match="no attribute 'prnue'"):
        ddp_vllm.prnue  # noqa: B018


def test_every_path_may_be_a_text_or_a_path() -> None:
    """Of each function, the arguments that are a folder, a file, or a model, which may be either."""
    places = ("model", "output", "recipe", "masks", "folder", "folders", "results", "dense", "pruned", "texts", "test")
    for name in ddp_vllm.__all__:
        function = getattr(ddp_vllm, name)
        for each in inspect.signature(function).parameters.values() if inspect.isfunction(function) else ():
            kind = str(each.annotation)
            assert ("str" in kind and "Path" in kind) or each.name not in places, f"{name}({each.name}: {kind})"
