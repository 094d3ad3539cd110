"""The public names: each is where the table says."""

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
