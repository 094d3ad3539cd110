"""What is known of a model without loading it: where it is, whether all of it is there, what a token costs."""

from pathlib import Path

import pytest

from ddp_benchmarks.models import describe_model
from ddp_benchmarks.sharegpt import _dtype


@pytest.mark.parametrize(
    ("arguments", "size"),
    [([], 2), (["--dtype", "float32"], 4), (["--dtype=float", "--enforce-eager"], 4), (["--dtype", "half"], 2)],
)
def test_keys_and_values_are_kept_in_vllms_dtype(tiny: Path, arguments: list[str], size: int) -> None:
    """The tiny model is float32 on disk; vLLM's dtype auto makes two bytes of four."""
    assert describe_model(str(tiny), dtype=_dtype(arguments)).kv_bytes_per_token == 2 * size * 32 * 2
