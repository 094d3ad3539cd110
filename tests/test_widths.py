"""The widths of stock classes, stated by names on disk: what they require of tensors, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from ddp_vllm.remote_code.files import WidthsError
from ddp_vllm.remote_code.widths import Widths

EXPERT = "mlp.experts.{}."
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 4,
    "quantization_config": {
        "quant_method": "ddp_widths",
        "layers_module": "model.language_model.layers",
        "mlp": {"inputs": ["mlp.gate_up"], "output": "mlp.down", "intermediate_size": 12, "fused": "halves"},
        "experts": {
            "inputs": [f"{EXPERT}w1", f"{EXPERT}w3"],
            "output": f"{EXPERT}w2",
            "intermediate_size": 8,
            "num_experts": 3,
        },
        "layers": [{"intermediate_size": 5}, {"expert_intermediate_sizes": [8, 0, 3]}, {}, {"intermediate_size": 12}],
    },
}
LAYERS = "model.language_model.layers"


def tensors() -> dict[str, list[int]]:
    """The tensors of a folder with these widths, and others whose names are similar."""
    shapes = {
        f"{LAYERS}.{layer}.mlp.{name}": shape
        for layer, width in ((0, 5), (2, 12), (3, 12))
        for name, shape in (
            ("gate_up.weight", [2 * width, 16]),
            ("gate_up.bias", [2 * width]),
            ("down.weight", [16, width]),
            ("down.bias", [16]),
        )
    }
    for expert, width in ((0, 8), (2, 3)):
        shapes |= {f"{LAYERS}.1.mlp.experts.{expert}.{name}.weight": [width, 16] for name in ("w1", "w3")}
        shapes[f"{LAYERS}.1.mlp.experts.{expert}.w2.weight"] = [16, width]
    shapes |= {name: [24, 16] for name in (f"{LAYERS}.4.mlp.gate_up.weight", "visual.layers.0.mlp.gate_up.weight")}
    return shapes | {f"{LAYERS}.1.mlp.shared.experts.0.w1.weight": [9, 16], f"{LAYERS}.0.mlp.gate_up.scale": [1]}


def check(config: dict[str, Any], shapes: dict[str, list[int]], dtype: str = "BF16") -> None:
    Widths.of(config).check((name, shape, dtype) for name, shape in shapes.items())


def test_a_folder_fits_and_is_written_as_it_was_read() -> None:
    check(CONFIG, tensors())
    assert Widths.of(CONFIG).to_json() == CONFIG["quantization_config"]


def test_shapes_follow_from_the_dense_ones() -> None:
    widths = Widths.of(CONFIG)
    dense = {
        name: [{5: 12, 10: 24, 3: 8}.get(size, size) for size in shape]
        for name, shape in tensors().items()
        if ".shared." not in name
    }
    for name, shape in dense.items():
        axis, length = widths.expected(name) or (0, shape[0])
        shape[axis] = length
    assert dense == {name: tensors()[name] for name in dense}
    assert widths.expected(f"{LAYERS}.1.mlp.experts.1.w2.weight") == (1, 0)  # a removed expert has no tensor


WHOLE = [[8, 0, 8], [0, 8, 8]]


def whole(rows: list[list[int]]) -> dict[str, Any]:
    """The config of a model that lost whole experts, which stock code loads."""
    stated = {**CONFIG["quantization_config"], "layers": [{"expert_intermediate_sizes": row} for row in rows]}
    del stated["mlp"]
    return {"num_hidden_layers": 2, "ddp_widths": stated}


def test_whole_experts_are_numbered_anew_on_disk() -> None:
    shapes = {
        f"{LAYERS}.{layer}.mlp.experts.{expert}.{name}.weight": [16, 8] if name == "w2" else [8, 16]
        for layer in range(2) for expert in range(2) for name in ("w1", "w2", "w3")
    }  # fmt: skip
    widths = Widths.of(whole(WHOLE))
    assert widths.to_json() == whole(WHOLE)["ddp_widths"] and widths.num_experts == 3
    widths.on_disk.check((name, shape, "BF16") for name, shape in shapes.items())
    with pytest.raises(WidthsError, match=r"experts.2.w1.weight' is of expert 2, but config.json has 2"):
        widths.on_disk.expected(f"{LAYERS}.1.mlp.experts.2.w1.weight")
    with pytest.raises(WidthsError, match=r"require 8 along axis 0"):
        widths.on_disk.check([(f"{LAYERS}.1.mlp.experts.1.w1.weight", [5, 16], "BF16")])
    with pytest.raises(WidthsError, match=r"keep \[1, 2\] whole experts"):
        _ = Widths.of(whole([[8, 0, 8], [0, 8, 0]])).on_disk


def test_a_copy_that_differs_is_refused() -> None:
    config = {**CONFIG, "ddp_widths": CONFIG["quantization_config"] | {"layers": [{}] * 4}}
    with pytest.raises(WidthsError, match="quantization_config is no copy of it"):
        Widths.of(config)
    assert Widths.of({**CONFIG, "ddp_widths": CONFIG["quantization_config"]}) == Widths.of(CONFIG)


def test_a_wrapper_states_its_layers_inside() -> None:
    config = {**CONFIG, "num_hidden_layers": 1, "text_config": {"num_hidden_layers": 4}}
    assert len(Widths.of(config).layers) == 4


STATED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {  # how to spoil the description -> words
    "layers of another model": (lambda stated: stated["layers"].append({}), "5 entries for 4 layers"),
    "an unknown key of a layer": (
        lambda stated: stated["layers"][2].update(heads=1),
        "layers[2] has the unknown key 'heads'",
    ),
    "an expert without a place": (
        lambda stated: stated["experts"].update(output="mlp.w2"),
        "experts.output is 'mlp.w2', not the name of a module with {} for the expert",
    ),
    "a width of 0": (lambda stated: stated["layers"][0].update(intermediate_size=0), "is 0, not an integer in 1…12"),
    "too few experts": (
        lambda stated: stated["layers"][1].update(expert_intermediate_sizes=[1, 2]),
        "not a list of 3 widths, one per expert",
    ),
    "an expert above": (
        lambda stated: stated["layers"][1].update(expert_intermediate_sizes=[1, 9, 2]),
        "expert_intermediate_sizes[1] is 9, not an integer in 0…8",
    ),
}


@pytest.mark.parametrize("case", STATED)
def test_a_description_that_contradicts_itself(case: str) -> None:
    spoil, words = STATED[case]
    config = copy.deepcopy(CONFIG)
    spoil(config["quantization_config"])
    with pytest.raises(WidthsError) as error:
        Widths.of(config)
    assert words in str(error.value) and "\n" not in str(error.value)


WEIGHTS: dict[str, tuple[dict[str, list[int] | None], str]] = {  # tensors to replace or leave out -> words
    "another width": (
        {f"{LAYERS}.0.mlp.down.weight": [16, 6]},
        "require 5 along axis 1; they are of different checkpoints",
    ),
    "half of a fused tensor": ({f"{LAYERS}.0.mlp.gate_up.weight": [5, 16]}, "require 10 along axis 0"),
    "a missing projection": (
        {f"{LAYERS}.3.mlp.down.weight": None},
        "layer 3 lacks the tensors of mlp.down (1 modules in all)",
    ),
    "a removed expert": (
        {f"{LAYERS}.1.mlp.experts.1.w1.weight": [1, 16]},
        "of a block or expert that config.json removes",
    ),
    "an expert too many": ({f"{LAYERS}.1.mlp.experts.3.w1.weight": [1, 16]}, "of expert 3, but config.json has 3"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_tensors_of_other_widths(case: str) -> None:
    changed, words = WEIGHTS[case]
    shapes = {name: shape for name, shape in (tensors() | changed).items() if shape is not None}
    with pytest.raises(WidthsError) as error:
        check(CONFIG, shapes)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_quantized_weights() -> None:
    with pytest.raises(WidthsError, match=r"is 'F8_E4M3': .*; export the unquantized model"):
        check(CONFIG, tensors(), "F8_E4M3")
