"""The latency of a step by widths: what a profile predicts for models that were not timed, and where it is kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from latency_profiles import CONFIG, EXPERTS, MIXTURE, seconds, written

from ddp_vllm.dimensions import widths_of
from ddp_vllm.errors import SettingError
from ddp_vllm.latency import Profile, find_profile, read_profile
from ddp_vllm.machine import Workload
from ddp_vllm.remote_code.widths import LayerWidths

DECODE = Workload(phase="decode", batch=8, context=256)


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return read_profile(written(tmp_path))


def layers(*widths: tuple[int, int]) -> list[LayerWidths]:
    return [LayerWidths(query_heads_per_kv_head=(2,) * heads, intermediate_size=channels) for heads, channels in widths]


@pytest.mark.parametrize("batch, context", [(8, 256), (1, 1024)])
def test_an_untimed_model_takes_as_long_as_its_blocks(profile: Profile, batch: int, context: int) -> None:
    """With widths between the measured ones, and with removed blocks."""
    pruned = layers((4, 900), (0, 513), (2, 0), (3, 128))
    expected = seconds(widths_of(CONFIG).dense_layers, batch, context) / seconds(pruned, batch, context)
    speedup, low, high = profile.speedup(pruned, Workload(phase="decode", batch=batch, context=context))
    assert speedup == pytest.approx(expected, rel=1e-6) and low - 1e-9 <= speedup <= high + 1e-9


@pytest.mark.parametrize("mixture", [1e-4, 2e-3])
def test_layers_that_differ_take_what_they_were_measured_to_take(mixture: float, tmp_path: Path) -> None:
    """Each width alone, the same in all layers, cannot show what a further number of KV heads costs."""
    profile, dense = read_profile(written(tmp_path, mixture=mixture)), seconds(widths_of(CONFIG).dense_layers)
    for pruned in (
        layers(*[(2, 512)] * 4),
        layers((4, 900), (0, 513), (4, 0), (3, 128)),
        layers((4, 0), (3, 0), (2, 0), (1, 0)),
    ):
        expected = dense / seconds(pruned, mixture=mixture)
        assert profile.speedup(pruned, DECODE)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("config", [CONFIG | {"num_hidden_layers": 1}, MIXTURE | {"moe_intermediate_size": 16}])
def test_a_model_whose_layers_cannot_differ_is_profiled_without_a_mixed_one(config: Any, tmp_path: Path) -> None:
    profile = read_profile(written(tmp_path, config))
    assert "mixed" not in {run.shape for run in profile.runs} and profile.times(DECODE).mixture == 0.0


@pytest.mark.parametrize(("kernel", "width"), [(0.8, 0), (0.8, 400), (1.0, 192), (1.5, 576), (1.5, 672), (1.5, 768)])
def test_experts_are_predicted_by_the_kernel_that_runs_them(kernel: float, width: int, tmp_path: Path) -> None:
    """The dense model runs another kernel, so slightly narrower experts may be slower, and the prediction shows it."""
    profile, dense = read_profile(written(tmp_path, MIXTURE, kernel=kernel)), widths_of(MIXTURE).dense_layers
    pruned = [replace(layer, expert_intermediate_sizes=(width,) * 8) for layer in dense]
    expected = seconds(dense) / seconds(pruned, kernel=kernel)
    assert (expected < 0.75) == (kernel > 1.0 and width > 700)
    assert profile.speedup(pruned, DECODE)[0] == pytest.approx(expected, rel=1e-6)
    times = profile.times(DECODE, 0)
    assert times.prunable["experts"] - times.removable(["experts"]) == pytest.approx(4 * 4 * kernel * EXPERTS)


def test_a_width_that_was_slower_than_the_dense_model_is_predicted_as_slower(tmp_path: Path) -> None:
    """Noise among narrower widths is smoothed: if 256 channels took longer than 512, 512 count as slow as 256."""
    path = written(tmp_path)
    content = json.loads(path.read_text())
    for run in content["times"]:
        for cell, dense in zip(run["cells"], run["dense"], strict=True):
            share = {"mlp 768": 1 / 0.83, "mlp 256": 0.95, "mlp 512": 0.9}.get(run["shape"])
            cell["decode"] = dense["decode"] * share if share else cell["decode"]
    path.write_text(json.dumps(content))
    for width, speedup in ((768, 0.83), (512, 1 / 0.95), (256, 1 / 0.95), (1024, 1.0)):
        middle, low, high = read_profile(path).speedup(layers(*[(4, width)] * 4), DECODE)
        assert middle == pytest.approx(speedup) and low <= middle <= high
    curve = read_profile(path).times(DECODE).curves["mlp"]
    assert curve.unit > 0 and curve.fixed >= 0


def test_unfit_profiles_are_refused(tmp_path: Path, profile: Profile) -> None:
    with pytest.raises(SettingError, match=r"8 × 256, not 16 × 256; measure that: .* --concurrency 16"):
        profile.times(Workload(phase="decode", batch=16, context=256))
    with pytest.raises(SettingError, match="not finished"):
        read_profile(written(tmp_path, complete=False))
    with pytest.raises(SettingError, match="not a profile of this version"):
        read_profile(written(tmp_path, format="another"))
    path = written(tmp_path)
    content = json.loads(path.read_text())
    path.write_text("{")
    with pytest.raises(SettingError, match="cannot be read"):
        read_profile(path)
    for shape, left in (("mlp 512", 1), ("attention 2", 0), ("mixed", 0)):
        rows = [row for row in content["times"] if row["shape"] != shape or row["round"] < left]
        path.write_text(json.dumps(content | {"times": rows}))
        with pytest.raises(SettingError, match="rounds, not as many of each of mlp 0, mlp 256, mlp 512"):
            read_profile(path)
    for value in (-1.0, 0, "fast", float("nan")):
        content["times"][3]["cells"][0]["decode"] = value
        path.write_text(json.dumps(content))
        with pytest.raises(SettingError, match=r"times\[3\].cells\[0\].decode: expected `float`"):
            read_profile(path)


@pytest.mark.usefixtures("cache")
def test_a_profile_is_cached_by_the_config_of_its_model(tmp_path: Path) -> None:
    """Engines of vLLM take minutes, so `measure` writes known times; only which file is read is tested."""
    measured: list[Path] = []

    def measure(model: Path, *, output: Path, **_: Any) -> Profile:
        measured.append(model)
        output.write_bytes(written(tmp_path).read_bytes())
        return read_profile(output)

    def profile_of(model: str, *, other_machine: bool = True, **changes: Any) -> Path:
        return find_profile("", Path(model), CONFIG | changes, DECODE, measure, other_machine=other_machine).path

    first = profile_of("model")
    assert profile_of("elsewhere") == first and measured == [Path("model")]
    assert profile_of("model", max_position_embeddings=512) != first and len(measured) == 2
    with pytest.raises(SettingError, match=r"hidden_size is 64, here it is 128; .* with ddp-vllm profile$"):
        profile_of("model", hidden_size=128)
    with pytest.raises(SettingError, match=r"num_experts is 8, here it is 6"):  # whole experts were removed
        read_profile(written(tmp_path, MIXTURE)).check_fits(MIXTURE | {"num_experts": 6}, {})
    with pytest.raises(SettingError, match=r"cpu is a CPU, here it is .* or pass --other-machine"):
        profile_of("model", other_machine=False)
