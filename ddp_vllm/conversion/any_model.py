"""Describes the narrower MLPs and experts of any architecture by the names and shapes of its
tensors.

An MLP is a module of a decoder layer with two or three matrices: one to the hidden size, and one or
two from it, or one that holds gate and up rows. Routed experts are such modules with a number in
their name. Only blocks that are narrower than the dense ones are described. All other tensors must
be alike in all layers of a type, because the stock class builds them so.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ddp_vllm.errors import ModelError
from ddp_vllm.families import text_config
from ddp_vllm.remote_code.files import short
from ddp_vllm.remote_code.module_widths import Block, LayerChannels, ModuleWidths
from ddp_vllm.remote_code.widths import EXPERT_COUNT_KEYS

Shapes = Mapping[str, list[int]]
COUNTS = (*EXPERT_COUNT_KEYS, "moe_num_experts")
WIDTH, EXPERT_WIDTH = "intermediate_size", "moe_intermediate_size"
_TENSOR = re.compile(r"(.+?)\.(\d{1,5})\.(.+)\.weight")
_EXPERT = re.compile(r"(.+)\.(\d{1,5})\.(\w+)")
_OTHERS = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|mtp)(\.|$)")  # towers, and heads that predict further tokens
_ATTENTION = re.compile(r"att(n|ention)")


class Form(NamedTuple):
    """The modules of an MLP, or of an expert, relative to their layer."""

    inputs: tuple[str, ...]
    output: str
    fused: str


def describe(config: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Any], ModuleWidths]:
    """Return the config with the dense sizes, and the widths of its MLPs and experts.

    shapes: of all tensors on disk.
    Raises: ModelError for tensors that fit no such widths, or if no block is narrower.
    """
    text = text_config(config)
    hidden, number, width = (_size(text, key) for key in ("hidden_size", "num_hidden_layers", WIDTH))
    where, layers = _decoder_layers(shapes, number)
    count = next((text[key] for key in COUNTS if text.get(key)), 0)
    mlps = [dict(_mlps(layer, hidden)) for layer in layers]
    experts = [dict(_experts(layer, hidden)) for layer in layers]
    mlp = _narrow_mlp(mlps, width)
    forms = {form for row in experts for form in row}
    if len(forms) > 1:
        raise ModelError(f"layers have experts of the forms {short([form.output for form in forms])}; one is known")
    form = next(iter(forms), None)
    expert_width = _size(text, EXPERT_WIDTH) if text.get(EXPERT_WIDTH) else width
    rows = [_row(row[form], count) if form in row else None for row in experts]
    expert_width = max([expert_width, *(size for row in rows if row for size in row)])
    if form and all(size == expert_width for row in rows if row for size in row):
        form, rows = None, [None] * number
    if mlp is None and form is None:
        raise ModelError(
            "no MLP and no expert is narrower than another or than config.json says, so vLLM serves it as it is"
        )
    blocks: dict[str, Block] = {}
    if mlp:
        width = max(width, *(row[mlp] for row in mlps if mlp in row))
        blocks["mlp"] = Block(**mlp._asdict(), intermediate_size=width)
    if form:
        blocks["experts"] = Block(**form._asdict(), intermediate_size=expert_width, num_experts=count)
    described = [
        LayerChannels(intermediate_size=row[mlp] if mlp and mlp in row else None, expert_intermediate_sizes=rows[index])
        for index, row in enumerate(mlps)
    ]
    if lacking := [index for index, row in enumerate(mlps) if mlp and mlp not in row and not experts[index]]:
        raise ModelError(
            f"layer {lacking[0]} has no {mlp.output if mlp else ''}; the stock class has one in each layer"
        )
    _check_the_rest(text, layers, {name for part in (mlp, form) if part for name in (*part.inputs, part.output)})
    sizes = {
        key: max(int(text[key]), size) for key, size in ((WIDTH, width), (EXPERT_WIDTH, expert_width)) if text.get(key)
    }
    widths = ModuleWidths(layers_module=where, layers=tuple(described), **blocks)
    if text is config:
        return {**config, **sizes}, widths
    return {**config, "text_config": {**text, **sizes}}, widths


def _size(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if type(value) is not int or not 0 < value <= 10_000_000:
        raise ModelError(f"{key} is {short(value)} in config.json; pass the folder of the dense model as --dense")
    return value


def _decoder_layers(shapes: Shapes, number: int) -> tuple[str, list[dict[str, list[int]]]]:
    """Return the module of the layers, and the matrices of each by their names. Raises:
    ModelError."""
    lists: dict[str, dict[int, dict[str, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    for name, shape in shapes.items():
        if (match := _TENSOR.fullmatch(name)) and not _OTHERS.search(match[1]):
            lists[match[1]][int(match[2])][match[3]] = shape
    places = [where for where, layers in lists.items() if layers.keys() >= {*range(number)}]
    if len(places) != 1:
        raise ModelError(
            f"its tensors have {len(places)} lists of {number} layers ({short(', '.join(places or lists))}), not one; "
            "pass the folder of the dense model as --dense if config.json has another number"
        )
    return places[0], [lists[places[0]][index] for index in range(number)]


def _mlps(layer: Shapes, hidden: int) -> Iterator[tuple[Form, int]]:
    """Yield the MLPs of a layer with their widths, those with experts' numbers left out."""
    parents: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for module, shape in layer.items():
        parent, _, _ = module.rpartition(".")
        if len(shape) == 2 and not _EXPERT.fullmatch(module) and not _ATTENTION.search(parent):
            parents[parent][module] = shape
    for modules in parents.values():
        if mlp := _form(modules, hidden):
            yield mlp


def _experts(layer: Shapes, hidden: int) -> Iterator[tuple[Form, dict[int, int]]]:
    """Yield the form of a layer's routed experts, and their widths by id. Raises: ModelError."""
    experts: dict[str, dict[int, dict[str, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    for module, shape in layer.items():
        if match := _EXPERT.fullmatch(module):
            experts[match[1]][int(match[2])][f"{match[1]}.{{}}.{match[3]}"] = shape
    for where, modules in experts.items():
        recognized = {expert: _form(parts, hidden) for expert, parts in modules.items()}
        forms = {pair[0] for pair in recognized.values() if pair}
        if wrong := [expert for expert, pair in recognized.items() if pair is None]:
            raise ModelError(
                f"{where}.{wrong[0]} has matrices of shapes {[*modules[wrong[0]].values()]}, not of an expert"
            )
        if len(forms) != 1 or len(experts) != 1:
            raise ModelError(f"{where} has experts of several forms; write them with one tensor per projection")
        yield forms.pop(), {expert: pair[1] for expert, pair in recognized.items() if pair}


def _form(modules: Shapes, hidden: int) -> tuple[Form, int] | None:
    """Return the form and the width of an MLP; None if its matrices have other shapes."""
    for output, (rows, width) in modules.items() if 2 <= len(modules) <= 3 else ():
        # gate before up, and w1 before w3
        inputs = tuple(sorted({*modules} - {output}))
        lengths = [modules[name] for name in inputs]
        if rows == hidden and all(shape == [width, hidden] for shape in lengths):
            return Form(inputs, output, ""), width
        if rows == hidden and lengths == [[2 * width, hidden]]:
            return Form(inputs, output, "halves"), width
    return None


def _narrow_mlp(mlps: list[dict[Form, int]], width: int) -> Form | None:
    """Return the MLP that is narrower in some layer than in another, or than config.json says; None
    if there is none. Raises: ModelError if there are several."""
    widths: dict[Form, set[int]] = defaultdict(set)
    for row in mlps:
        for form, size in row.items():
            widths[form].add(size)
    narrow = [form for form, sizes in widths.items() if len(sizes) > 1]
    if not narrow:  # config.json does not state the width of shared experts
        narrow = [form for form, sizes in widths.items() if max(sizes) < width and "shared" not in form.output]
    if len(narrow) > 1:
        names = short(" and ".join(form.output for form in narrow))
        raise ModelError(f"{names} differ between layers; only one MLP per layer may be narrower")
    return narrow[0] if narrow else None


def _row(widths: Mapping[int, int], count: int) -> tuple[int, ...]:
    """Return the widths of all experts of a layer. Raises: ModelError for an expert too many."""
    if max(widths) >= count:
        raise ModelError(f"there are tensors of expert {max(widths)}, but config.json has {count} experts")
    return tuple(widths.get(expert, 0) for expert in range(count))


def _check_the_rest(text: Mapping[str, Any], layers: list[dict[str, list[int]]], pruned: set[str]) -> None:
    """Refuse other modules that differ between layers of a type. Raises: ModelError."""
    types = text.get("layer_types")
    kinds = types if isinstance(types, list) and len(types) == len(layers) else [""] * len(layers)
    first: dict[tuple[str, str], tuple[int, list[int]]] = {}
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        for module, shape in layer.items():
            name = _EXPERT.sub(r"\1.{}.\3", module)
            other, expected = first.setdefault((str(kind), name), (index, shape))
            if name not in pruned and shape != expected:
                raise ModelError(
                    f"{module} has shape {shape} in layer {index} and {expected} in layer {other}, but of this "
                    "architecture only MLPs and experts may be narrower; prune these alone"
                )
