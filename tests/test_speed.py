"""The latency profile of a model is measured once, wherever the model lies."""

from pathlib import Path
from typing import Any

import pytest
from latency_profiles import CONFIG, written

from ddp_vllm.errors import SettingError
from ddp_vllm.latency import Profile, Workload, read_profile
from ddp_vllm.speed import find_profile


@pytest.mark.usefixtures("cache")
def test_a_profile_is_cached_by_the_config_of_its_model(tmp_path: Path) -> None:
    """Engines of vLLM take minutes, so `measure` writes known times; only which file is read is tested."""
    measured: list[Path] = []

    def measure(model: Path, *, output: Path, **_: Any) -> Profile:
        measured.append(model)
        output.write_bytes(written(tmp_path).read_bytes())
        return read_profile(output)

    def profile_of(model: str, **changes: Any) -> Path:
        workload = Workload(phase="decode", batch=8, context=256)
        return find_profile("", Path(model), CONFIG | changes, workload, measure, other_machine=True).path

    first = profile_of("model")
    assert profile_of("elsewhere") == first and measured == [Path("model")]
    assert profile_of("model", max_position_embeddings=512) != first and len(measured) == 2
    with pytest.raises(SettingError, match="hidden_size is 64, here it is 128"):
        profile_of("model", hidden_size=128)
