"""Describes the narrower MLPs and experts of a model whose class is transformers' own.

The class says what a tensor is, never its name or its size: it is built twice on the meta device,
which takes no memory, with config.json and with other widths there. The axis whose length differs
between the two is one of channels. A module of one matrix that reads channels, and of one or two
that compute them, is an MLP, or a routed expert if transformers stacks it with others. These may be
narrower. Every other tensor must have the shape that the class has.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ddp_vllm.errors import ModelError, reading
from ddp_vllm.families import register_pruned
from ddp_vllm.remote_code.files import short
from ddp_vllm.remote_code.tensors import LAYERS, Config, Projection, Shapes, TensorTable
from ddp_vllm.remote_code.widths import UNITS, LayerWidths, Widths, block_table

WIDTH = "intermediate_size"
DENSE = "pass the dense model's folder as --dense if config.json has pruned sizes"
_PLACE = re.compile(r"(.+?)\.(\d+)\.(.+)\.weight")  # list of layers, layer, module
_EXPERT = re.compile(r"\.(\d+)(?=\.\w+(\.weight)?$)")
# tensors that are computed, and those of heads that predict further tokens
_IGNORED = (r"(^|\.)mtp\.", r"rotary_emb\.inv_freq$", r"\.position_ids$")


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of the class, as save_pretrained writes it."""

    shape: list[int]
    axis: int | None
    """The axis of channels, if it has one."""
    rows: float
    """Change of its length along that axis per channel that config.json adds."""
    loaded: str
    """The tensor in memory that it is, or is a part of."""
    is_part: bool
    """Whether it is of a routed expert, which transformers stacks with others."""


class Stock:
    """The tensors that transformers' class has by a `config.json`."""

    def __init__(self, config: Config) -> None:
        """Raises: ModelError if transformers has no such class, or cannot build it."""
        from transformers.core_model_loading import revert_weight_conversion

        from ddp_vllm.remote_code.configuration_ddp_widths import renaming

        model, other = _built(config, wider=False), _built(config, wider=True)
        self.name, state = type(model).__name__, model.state_dict()
        self.ignored = [*_IGNORED, *(model._keys_to_ignore_on_load_unexpected or ())]
        self._rename = renaming(model)
        saved, wider = (revert_weight_conversion(built, built.state_dict()) for built in (model, other))
        self.parts: dict[str, list[str]] = {name: [] for name in state}
        """Tensor in memory -> those that save_pretrained writes for it."""
        for name in saved:
            self.parts[self._rename(name)[0]].append(name)
        self.tensors: dict[str, Tensor] = {}
        for loaded, names in self.parts.items():
            for name in names:
                shape, larger = [*saved[name].shape], wider[name].shape
                axis = next((i for i, length in enumerate(shape) if length != larger[i]), None)
                rows = 0 if axis is None else larger[axis] - shape[axis]
                self.tensors[name] = Tensor(shape=shape, axis=axis, rows=rows, loaded=loaded, is_part=len(names) > 1)
        patterns = model._keys_to_ignore_on_load_missing or ()
        spared = {name for name in state if any(re.search(pattern, name) for pattern in patterns)}
        spared |= model.all_tied_weights_keys.keys()
        self.optional = {part for name in spared for part in self.parts.get(name, ())}
        """Tied tensors, and those that transformers does not miss."""
        self.num_layers = int(model.config.get_text_config().num_hidden_layers)

    def known(self, name: str) -> str | None:
        """Return the name of a tensor on disk as save_pretrained writes it; None if the class has
        no such tensor."""
        parts = [name] if name in self.tensors else self.parts.get(self._rename(name)[0], [])
        return next((part for part in parts if len(parts) == 1 or _in_layer(part) == _in_layer(name)), None)

    def modules(self) -> Iterator["Module"]:
        """Yield each MLP and routed expert."""
        modules: dict[str, list[str]] = defaultdict(list)
        for name, tensor in self.tensors.items():
            if tensor.axis is not None:
                modules[name.rpartition(".")[0].rpartition(".")[0]].append(name)
        for names in modules.values():
            weights = [name for name in names if name.endswith(".weight")]
            inputs, outputs = ([name for name in weights if self.tensors[name].axis == axis] for axis in (0, 1))
            if len(outputs) != 1 or any(len(self.tensors[name].shape) != 2 for name in weights):
                continue
            output = self.tensors[outputs[0]]
            factors = [self.tensors[name].rows / output.rows for name in inputs]
            if factors in ([1], [1, 1], [2]):
                expert = _EXPERT.search(outputs[0]) if output.is_part else None
                number = int(expert[1]) if expert else 0
                yield Module(names, inputs, outputs[0], int(factors[0]), output, number)


class Module(NamedTuple):
    """An MLP or a routed expert of the class."""

    names: list[str]
    """Its tensors that have an axis of channels."""
    inputs: list[str]
    output: str
    factor: int
    """Rows of an input per channel."""
    tensor: Tensor
    """That of the output."""
    number: int
    """The expert's; 0 of an MLP."""


def _in_layer(name: str) -> list[str]:
    """Return the layer of a tensor and its name there, whatever is around the layers."""
    place = _PLACE.fullmatch(name)
    return [*place.groups()[1:]] if place else [name]


def _built(config: Config, *, wider: bool) -> Any:
    """Return the model on the meta device; wider: with other widths than config.json states, so
    much larger that no class rounds both to the same. Raises: ModelError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    register_pruned(config)  # of DeepSeekMoE v1, which transformers does not know
    model_type = config.get("model_type")
    with reading("config.json", ModelError, "download it again, or update transformers"):
        fields = PreTrainedConfig._decode_special_floats(config)  # infinity and NaN, which JSON lacks
        settings = CONFIG_MAPPING[model_type].from_dict(fields) if model_type in CONFIG_MAPPING else None
        kinds: tuple[Any, ...] = (AutoModelForImageTextToText, AutoModelForCausalLM)
        kind = next((auto for auto in kinds if type(settings) in auto._model_mapping), None)
        if settings is None or kind is None:
            raise ModelError(f"transformers has no class for model_type {short(model_type)}; update it")
        text = settings.get_text_config()
        for key in [key for key in text.to_dict() if key.endswith(WIDTH)] if wider else ():
            width = getattr(text, key)
            more = [2 * part + 768 for part in width] if isinstance(width, list | tuple) else width
            setattr(text, key, 2 * width + 768 if isinstance(width, int) else more)
        with torch.device("meta"):
            return kind.from_config(settings, trust_remote_code=False)


class Form(NamedTuple):
    """The modules of an MLP, or of an expert, relative to their layer, as on disk."""

    layers_module: str
    inputs: tuple[str, ...]
    output: str
    fused: bool
    block: str
    """`mlp` or `experts`."""


class Width(NamedTuple):
    """The channels of one MLP or expert on disk, and those that the class has."""

    kept: int
    dense: int


Rows = dict[int, dict[int, Width]]  # layer -> expert, or 0 -> its width


def describe(config: Config, shapes: Shapes) -> tuple[dict[str, Any], Widths]:
    """Return the config with the class's name, and the widths of its MLPs and experts, of those
    kinds of which one is narrower.

    shapes: of all tensors on disk.
    Raises: ModelError for a tensor that is missing, unknown or of another shape than the class has
        by config.json, naming it.
    """
    stock, on_disk = Stock(config), dict[str, str]()
    for name in shapes:
        if (known := stock.known(name)) is not None:
            on_disk[known] = name
        elif not any(re.search(pattern, name) for pattern in stock.ignored):
            raise ModelError(
                f"tensor {short(name)} of shape {shapes[name]} is none that {stock.name} has by config.json; prune "
                f"without adding tensors, and {DENSE}"
            )
    rows, required = _widths_on_disk(stock, shapes, on_disk)
    if missing := required.keys() - on_disk.keys() - stock.optional:
        raise ModelError(
            f"tensor {min(missing)} of shape {required[min(missing)]} is missing ({len(missing)} in all), which "
            f"{stock.name} has by config.json; copy the whole folder again, and {DENSE}"
        )
    for known, shape in required.items():
        if known in on_disk and shapes[on_disk[known]] != shape:
            raise ModelError(
                f"tensor {on_disk[known]} has shape {shapes[on_disk[known]]}, but {stock.name} has {shape} by "
                "config.json, and of this architecture only MLPs and experts may be narrower; prune these alone, and "
                + DENSE
            )
    return {"architectures": [stock.name], **config}, _described(stock, rows)


def _widths_on_disk(
    stock: Stock, shapes: Shapes, on_disk: Mapping[str, str]
) -> tuple[dict[Form, Rows], dict[str, list[int]]]:
    """Return the widths of all MLPs and experts, and the shape that each tensor must have with
    them; an expert without tensors has width 0. Raises: ModelError for more channels than
    config.json has."""
    required = {name: tensor.shape for name, tensor in stock.tensors.items()}
    rows: dict[Form, Rows] = defaultdict(lambda: defaultdict(dict))
    removed: list[Module] = []
    forms: dict[str, tuple[Form, int]] = {}  # output in memory -> form and layer
    for module in stock.modules():
        names, dense = (*module.inputs, module.output), module.tensor.shape[1]
        if module.tensor.is_part and not any(name in on_disk for name in names):
            removed.append(module)
        if not all(name in on_disk for name in names):
            continue
        kept = shapes[on_disk[module.output]][-1]
        if kept > dense:
            raise ModelError(f"{module.output} has {kept} channels on disk and {dense} by config.json; {DENSE}")
        for name in module.names:
            length = kept * (1 if name == module.output else module.factor)
            axis = stock.tensors[name].axis
            required[name] = [length if i == axis else size for i, size in enumerate(required[name])]
        places = [_PLACE.fullmatch(on_disk[name]) for name in names]
        layers_module, layer = next((place[1], int(place[2])) for place in places if place)
        parts = [place[3] for place in places if place]
        *inputs, output = (_EXPERT.sub(".{}", part) if module.tensor.is_part else part for part in parts)
        block = "experts" if module.tensor.is_part else "mlp"
        form = Form(layers_module, tuple(inputs), output, module.factor == 2, block)
        forms[module.tensor.loaded] = form, layer
        rows[form][layer][module.number] = Width(kept, dense)
    for module in removed:
        if module.tensor.loaded in forms:  # other experts of the layer are on disk
            form, layer = forms[module.tensor.loaded]
            rows[form][layer][module.number] = Width(0, module.tensor.shape[1])
            for name in module.names:
                required.pop(name, None)
    return rows, required


def _described(stock: Stock, forms: Mapping[Form, Rows]) -> Widths:
    """Return the description of the blocks that are narrower. Raises: ModelError if there are too
    many kinds of them."""
    widths = [(form, row, width) for form, rows in forms.items() for row in rows.values() for width in row.values()]
    narrow = {form for form, _, width in widths if width.kept < width.dense}
    projections, dense = list[Projection](), LayerWidths()
    layers, modules = [LayerWidths() for _ in range(stock.num_layers)], set[str]()
    for block in UNITS:
        kinds = {
            (form, width.dense, len(row))
            for form, row, width in widths
            # all experts, because transformers stacks them in every layer or in none
            if form in narrow and form.block == block and (block == "experts" or width.kept < width.dense)
        }
        if len(kinds) > 1:
            names = " and ".join(sorted(f"{form.output} of {width} channels" for form, width, _ in kinds))
            raise ModelError(f"{names} are narrower, but only one kind per model may be; prune one of them")
        for form, width, number in kinds:
            projections += block_table(block, form.inputs, form.output, fused=form.fused)
            modules.add(form.layers_module)
            dense = _with_sizes(dense, block, [width] * number)
            for index, row in forms[form].items():
                if row[0].dense == width:
                    layers[index] = _with_sizes(layers[index], block, [row[part].kept for part in sorted(row)])
    if len(modules) > 1:
        raise ModelError(
            f"layers are in {short(' and '.join(sorted(modules)))}; only those of one list may be narrower"
        )
    table, layers_module = TensorTable(projections=tuple(projections)), next(iter(modules), LAYERS)
    return Widths(table=table, layers=tuple(layers), dense=dense, layers_module=layers_module, is_family=False)


def _with_sizes(layer: LayerWidths, block: str, sizes: Sequence[int]) -> LayerWidths:
    """Return the widths of a layer with those of its experts, or of its one MLP."""
    if block == "experts":
        return replace(layer, expert_intermediate_sizes=tuple(sizes))
    return replace(layer, intermediate_size=sizes[0])
