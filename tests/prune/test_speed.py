"""The profile that a budget in measured time needs is measured once for a model, wherever the model lies."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from latency_profiles import written

from ddp_prune.recipe import Recipe
from ddp_prune.speed import with_profile


@pytest.mark.usefixtures("cache")
def test_a_profile_is_kept_by_what_the_model_is(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of vLLM take minutes, so `measure` writes times that are known; only which file is taken is tried."""
    measured: list[Path] = []

    def measure(model: Path, *, output: Path, **_: Any) -> None:
        measured.append(model)
        content = json.loads(written(tmp_path).read_text())
        output.write_text(json.dumps(content))

    monkeypatch.setattr("ddp_prune.speed.measure", measure)

    def profile_of(model: Path | str) -> str:
        recipe = Recipe(model=str(model), speedup=1.2, budget="latency", other_machine=True)
        return with_profile(recipe, verbose=False).profile

    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "model")
    first = profile_of("model")
    shutil.copytree("model", "elsewhere")
    assert {profile_of(each) for each in ("./model", tmp_path / "model", "elsewhere")} == {first}
    assert len(measured) == 1
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    assert profile_of("model") != first and len(measured) == 2
