"""Finds what can be pruned in a model of any architecture: by structure and by computing with it,
never by name.

An MLP is a module of a decoder layer whose linear layers are one projection back to the hidden
size, and one or two projections to its input: gate and up, both in one tensor, or one before an
activation. MLPs of a layer with a block of routed experts are shared experts, which are left as
they are. Routed experts that can be pruned are modules of transformers' experts interface. MLPs and
experts are recognized by a trial: a copy with a few channels and random weights must compute the
same with a channel masked as with that channel cut out. Everything else of the model is left as it
is.

Names on disk differ from those in transformers (towers of other modalities, one tensor per expert).
transformers' own rules for loading give the one for the other.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_prune.core.decoder import auto_class, decoder_layers
from ddp_vllm.dimensions import count_chosen_experts, text_config
from ddp_vllm.errors import ModelError, reading
from ddp_vllm.remote_code.configuration_ddp_widths import check_present, renaming
from ddp_vllm.remote_code.files import WidthsError, short
from ddp_vllm.remote_code.tensors import Projection, TensorTable
from ddp_vllm.remote_code.widths import METHOD, LayerWidths, Widths, block_table

HIDDEN, CHANNELS, EXPERTS, TOKENS = 16, 6, 3, 5  # sizes of the copies that are tried
MAGNITUDES = torch.logspace(-1, 3, TOKENS)[:, None]  # of their inputs: some reach every clamp
SCALES = (0.7, 0.0, 1.3, 0.0, 1.0, 0.4)  # of the channels of a copy; two of them are removed
AGAIN = "update transformers, or prune another model"


class Mlp(NamedTuple):
    """An MLP of a decoder layer; modules relative to the layer."""

    inputs: tuple[str, ...]
    output: str
    width: int
    """Channels."""
    is_fused: bool
    """Whether the one input holds the rows of gate and up, as halves."""


class Experts(NamedTuple):
    """The routed experts of a decoder layer."""

    module: str
    number: int
    width: int
    """Channels of an expert."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What can be pruned in a model, by its names in transformers and on disk."""

    widths: Widths
    """The dense widths and the names on disk; layers whose blocks are left as they are state no
    widths."""
    stacked: Mapping[str, tuple[str, ...]]
    """Tensor on disk, relative to its layer, that holds all experts of a layer -> the modules of
    one expert in it."""
    left_alone: tuple[str, ...]
    """What is not pruned, in words."""
    loaded: frozenset[str]
    """Tensors on disk that transformers loads; towers of other modalities and prediction heads are
    left on disk."""
    text: Mapping[str, Any]
    """The sizes of the language model, which config.json may leave to the defaults of its class."""

    def describe(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dense model's config with these widths and all sizes of its language model."""
        text = {**self.text, **text_config(config)}
        stated = {**config, "text_config": text} if text_config(config) is not config else text
        return stated | {METHOD: self.widths.to_json()}

    def singles(self, name: str) -> tuple[str, list[str]]:
        """Return the layer of a tensor that stacks experts, and the modules of one expert in it;
        none for others."""
        layer, module, _ = self.widths.split(f"{name}.weight") or (0, "", "")
        return f"{self.widths.layers_module}.{layer}", [*self.stacked.get(module, ())]

    def unstacked(self, name: str, shape: Sequence[int]) -> dict[str, list[int]]:
        """Return the shapes of the experts in a tensor by the names of single ones; other tensors
        as they are."""
        layer, modules = self.singles(name)
        if not modules:
            return {name: list(shape)}
        number, rows, columns = shape
        single = [rows // len(modules), columns]
        return {f"{layer}.{module.format(expert)}.weight": single for module in modules for expert in range(number)}

    def unstack(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the experts in a tensor by the names of single ones; other tensors as they are."""
        layer, modules = self.singles(name)
        for module, parts in zip(modules, tensor.chunk(len(modules), dim=1) if modules else (), strict=True):
            for expert, weight in enumerate(parts.unbind()):
                yield f"{layer}.{module.format(expert)}.weight", weight.contiguous()
        if not modules:
            yield name, tensor


def find_structure(folder: Path, shapes: Mapping[str, Sequence[int]], *, to_prune: bool = True) -> Structure:
    """Return what can be pruned in the model of a folder.

    shapes: of its tensors on disk. to_prune: whether there must be something. Raises: ModelError, which names a
        tensor that is missing, or the modules that were not recognized.
    """
    from transformers import AutoConfig

    with reading(folder, ModelError, AGAIN):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with reading(folder, ModelError, AGAIN), torch.device("meta"):
        model: Any = auto_class(config).from_config(config, trust_remote_code=False)
    if config.is_encoder_decoder or "decoder_input_ids" in signature(type(model).forward).parameters:
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder, and ddp-vllm prunes decoder-only models; choose one of them"
        )
    prefix, layers = decoder_layers(model)
    hidden_size = config.get_text_config().hidden_size
    experts = [_find_experts(layer) for layer in layers]
    routed = [_expert_modules(layer, hidden_size) for layer in layers]
    mlps, rest = _find_mlps(list(layers), hidden_size, routed)
    if to_prune and not any(experts) and not any(mlps):
        modules = {
            f"{name} ({type(module).__name__})": module for part in layers for name, module in part.named_modules()
        }
        names = sorted(name for name, module in modules.items() if _multiplies(module))
        noted = f" ({' and '.join(rest)} are left as they are)" if rest else ""
        raise ModelError(
            f"no MLP and no routed experts that could be pruned were recognized in {type(model).__name__}{noted}; "
            f"modules of its layers: {', '.join(names)}"
        )
    rename = renaming(model)
    stored = {name: rename(name)[0] for name in shapes}  # name on disk -> in transformers
    mlp, experts_block = _most_common(mlps), _most_common(experts)
    projections: tuple[Projection, ...] = ()
    stacked: dict[str, tuple[str, ...]] = {}
    where = next((_split(name, 0)[0] for name, target in stored.items() if target.startswith(f"{prefix}.0.")), "")
    if mlp:
        where, projections = _mlp_on_disk(stored, prefix, mlps.index(mlp), mlp)
    if experts_block:
        try:
            where, single, stacked = _experts_on_disk(
                model, stored, shapes, prefix, experts.index(experts_block), experts_block
            )
            projections += single
        except ModelError:  # the MLPs can be pruned all the same
            if to_prune and not mlp:
                raise
            experts_block = None
    dense = LayerWidths(
        intermediate_size=mlp.width if mlp else 0,
        expert_intermediate_sizes=(experts_block.width,) * experts_block.number if experts_block else None,
    )
    rows = tuple(
        LayerWidths(
            intermediate_size=dense.intermediate_size if mlps[index] == mlp else 0,
            expert_intermediate_sizes=dense.expert_intermediate_sizes if experts[index] == experts_block else None,
        )
        for index in range(len(layers))
    )
    table = TensorTable(projections=projections)
    if any(routed) and not any(row.expert_intermediate_sizes for row in rows):
        reason = "which are not stored one by one" if any(experts) else "whose form is not known"
        rest.insert(0, f"routed experts, {reason}")
    text, parameters = config.get_text_config().to_dict(), set(model.state_dict())
    widths = Widths(table=table, layers=rows, dense=dense, layers_module=where, is_family=False)
    try:
        check_present(model, widths, shapes)
    except WidthsError as error:
        raise ModelError(f"{str(error).partition(';')[0]}; download the model again, as published") from None
    return Structure(
        widths=widths,
        stacked=stacked,
        left_alone=("attention and other token mixers", *rest, *_left_alone(model, stored, rows)),
        loaded=frozenset(name for name, target in stored.items() if target in parameters),
        text={**text, "num_experts_per_tok": count_chosen_experts(text)},
    )


def _multiplies(module: nn.Module) -> bool:
    """Tell whether a module, or a child of it, has a matrix."""
    return any(weight.dim() > 1 for part in (module, *module.children()) for weight in part.parameters(recurse=False))


def _most_common(candidates: Sequence[Any]) -> Any:
    """Return the block that most layers have; other layers are left as they are, because a folder
    states one form."""
    return next((block for block, _ in Counter(filter(None, candidates)).most_common(1)), None)


def _left_alone(model: Any, stored: Mapping[str, str], rows: Sequence[LayerWidths]) -> Iterator[str]:
    """Yield in words which layers, heads and towers are not pruned."""
    pruned = {index for index, row in enumerate(rows) if row != LayerWidths()}
    if others := [str(index) for index in range(len(rows)) if index not in pruned]:
        yield f"layers {', '.join(others)}, where no MLP or experts of that form were recognized"
    loaded = set(model.state_dict())
    others = [name for name, target in stored.items() if target not in loaded]
    if any("mtp" in name or ".layers." in name for name in others):
        yield "heads that predict further tokens"
    if any(re.search(r"visual|vision|audio", name) for name in stored):
        yield "towers of other modalities"


def _find_mlps(
    layers: Sequence[nn.Module], hidden_size: int, routed: Sequence[Sequence[str]]
) -> tuple[list[Mlp | None], list[str]]:
    """Return the MLP of each layer, None if there is none or more than one, and in words which MLPs
    are left as they are.

    routed: the `_expert_modules` of each layer. All MLPs of a layer with a block of routed experts
        are shared experts, in the block or next to it. Gemma 4's experts are in no block: they have
        norms of their own.
    """
    candidates = [list(_mlps_of(layer, hidden_size)) for layer in layers]
    weights = [
        [id(layer.get_submodule(mlp.output).weight) for mlp in mlps]
        for layer, mlps in zip(layers, candidates, strict=True)
    ]
    uses = Counter(weight for numbers in weights for weight in numbers)
    chosen, rest = list[Mlp | None](), dict[str, None]()
    for layer, mlps, numbers, modules in zip(layers, candidates, weights, routed, strict=True):
        is_tied = any(uses[number] > 1 for number in numbers)
        # a block holds more than the experts, such as their router
        has_block = any("." in name or any(map(_multiplies, layer.get_submodule(name).children())) for name in modules)
        others = [module for name, module in layer.named_modules() if name not in modules]
        if has_block and (mlps or any(_stacks(module, hidden_size) for module in others)):
            rest["shared experts"] = None
        elif is_tied:
            rest["MLPs that several layers share"] = None
        chosen.append(mlps[0] if len(mlps) == 1 and not has_block and not is_tied else None)
    return chosen, list(rest)


def _stacks(module: nn.Module, hidden_size: int) -> list[int]:
    """Return how many matrices that read or write the hidden size each tensor of a module holds."""
    weights = [weight for weight in module.parameters(recurse=False) if weight.dim() == 3 and len(weight) > 1]
    return [len(weight) for weight in weights if hidden_size in weight.shape[1:]]


def _expert_modules(layer: nn.Module, hidden_size: int) -> list[str]:
    """Return the modules of a layer that hold routed experts of any form: those of transformers'
    interface, and those with tensors [experts, …, …] where another module has a router, [experts,
    hidden size]."""
    routers = {
        (name.rpartition(".")[0], len(weight))
        for name, weight in layer.named_parameters()
        if weight.dim() == 2 and weight.shape[1] == hidden_size
    }
    return [
        name
        for name, module in layer.named_modules()
        if _is_experts(module)
        or any(number in _stacks(module, hidden_size) for router, number in routers if router != name)
    ]


def _mlps_of(layer: nn.Module, hidden_size: int) -> Iterator[Mlp]:
    """Yield the MLPs of a layer, with the names of their projections relative to it."""
    for name, module in layer.named_modules():
        if name and (parts := _linear_parts(module, hidden_size)) and _masks_like_a_cut(module, parts):
            yield parts._replace(
                inputs=tuple(f"{name}.{part}" for part in parts.inputs), output=f"{name}.{parts.output}"
            )


def _linear_parts(module: nn.Module, hidden_size: int) -> Mlp | None:
    """Return the projections of a module if they can be those of an MLP, by their sizes; names
    relative to it."""
    linear = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    if not 2 <= len(linear) <= 3:
        return None
    *inputs, output = linear  # modules are made in the order of use; a trial decides
    for candidate in (output, *inputs):
        width = linear[candidate].in_features
        others = tuple(name for name in linear if name != candidate)
        rows = {linear[name].out_features for name in others}
        fits = linear[candidate].out_features == hidden_size and all(
            linear[name].in_features == hidden_size for name in others
        )
        if fits and (rows == {width} or (len(others) == 1 and rows == {2 * width})):
            return Mlp(others, candidate, width, rows == {2 * width})
    return None


@torch.no_grad()
def _masks_like_a_cut(module: nn.Module, parts: Mlp) -> bool:
    """Tell whether a small copy of an MLP computes the same with channels masked as with these
    channels cut out."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor(SCALES)
    kept = scales > 0
    x = torch.randn(1, TOKENS, HIDDEN, generator=generator) * MAGNITUDES
    results = []
    # a module that takes other arguments, or has other parameters, is no MLP
    with suppress(Exception):
        linear = {
            name: _small_copy(getattr(module, name), name == parts.output, 1 + parts.is_fused, generator)
            for name in (*parts.inputs, parts.output)
        }
        mlp = _with_children(module, linear)
        dense = mlp(x)
        hook = linear[parts.output].register_forward_pre_hook(lambda _, args: (args[0] * scales, *args[1:]))
        results.append(mlp(x))
        hook.remove()
        for name in parts.inputs:
            _set_weight(linear[name], kept.repeat(1 + parts.is_fused), axis=0)
        linear[parts.output].weight.mul_(scales)
        _set_weight(linear[parts.output], kept, axis=1)
        results.append(mlp(x))
        same = dense.shape == x.shape and _agree(results[0], results[1])
        return same and not torch.allclose(dense, results[0], atol=1e-3)
    return False


def _agree(one: Tensor, other: Tensor) -> bool:
    """Tell whether two results are the same up to the rounding of each token's largest number."""
    return bool(((one - other).abs() <= 1e-5 + 1e-5 * other.abs().amax(-1, keepdim=True)).all())


def _small_copy(linear: nn.Linear, is_output: bool, rows: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer of the same class with few channels and random weights."""
    sizes = (CHANNELS, HIDDEN) if is_output else (HIDDEN, rows * CHANNELS)
    small = type(linear)(*sizes, bias=linear.bias is not None)
    for parameter in small.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return small


def _with_children(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of a module that has other children of these names, and some value in every
    other parameter.

    The value decides nothing: activations with parameters treat all channels alike.
    """
    changed = copy.copy(module)
    others = {name: copy.deepcopy(child) for name, child in module.named_children() if name not in children}
    for child in others.values():
        child.to_empty(device="cpu")
        for tensor in (*child.parameters(), *child.buffers()):
            tensor.fill_(0.5)
    changed._modules = {name: children.get(name, others.get(name)) for name in module._modules}
    return changed.eval()


def _set_weight(linear: nn.Linear, kept: Tensor, axis: int) -> None:
    """Keep some rows (axis 0) or columns of a linear layer."""
    linear.weight = nn.Parameter(linear.weight[kept] if axis == 0 else linear.weight[:, kept])
    if axis == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias[kept])


def _is_experts(module: nn.Module) -> bool:
    """Tell whether a module implements transformers' experts interface."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_bias", "has_gate", "_apply_gate", "down_proj"))


def _find_experts(layer: nn.Module) -> Experts | None:
    """Return the routed experts of a layer; None if there are none, more than one, or of a form
    that has no gates."""
    modules = [(name, module) for name, module in layer.named_modules() if _is_experts(module)]
    if len(modules) != 1:
        return None
    name, module = modules[0]
    weights: list[Any] = [getattr(module, projection, None) for projection in ("gate_up_proj", "down_proj")]
    if any(getattr(weight, "ndim", 0) != 3 for weight in weights) or not _gates_like_weights(module):
        return None
    number, _, width = weights[1].shape
    return Experts(name, number, width)


@torch.no_grad()
def _gates_like_weights(module: Any) -> bool:
    """Tell whether a small copy of experts with its gates folded into the down projection computes
    what `ddp_prune.core.experts` computes with gates, and whether closed channels have no other
    effect."""
    generator = torch.Generator().manual_seed(0)
    masks_EC = torch.tensor(SCALES) * torch.tensor([[1.0], [0.5], [2.0]])
    x_TH = torch.randn(TOKENS, HIDDEN, generator=generator) * MAGNITUDES
    ids_TK = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0], [2, 1]])
    shares_TK = torch.rand(TOKENS, 2, generator=generator)
    gate_up = torch.randn(EXPERTS, 2 * CHANNELS, HIDDEN, generator=generator) * 0.4
    down = torch.randn(EXPERTS, HIDDEN, CHANNELS, generator=generator) * 0.4
    with suppress(Exception):  # of experts with other parameters, such as biases
        small = copy.copy(module)
        small.config = copy.deepcopy(module.config)
        small.config._experts_implementation = "eager"
        small._parameters = dict.fromkeys(module._parameters)
        small.num_experts = EXPERTS
        expected = torch.zeros_like(x_TH)
        for token, (ids, shares) in enumerate(zip(ids_TK.tolist(), shares_TK, strict=True)):
            for expert, share in zip(ids, shares, strict=True):
                product = small._apply_gate(x_TH[token : token + 1] @ gate_up[expert].T) * masks_EC[expert]
                expected[token] += share * (product @ down[expert].T)[0]
        is_closed = (masks_EC == 0).repeat(1, 2)[..., None]
        small.gate_up_proj = nn.Parameter(torch.where(is_closed, gate_up.flip(1), gate_up))
        small.down_proj = nn.Parameter(down * masks_EC[:, None])
        return _agree(small(x_TH, ids_TK, shares_TK), expected)
    return False


def _on_disk(stored: Mapping[str, str], name: str) -> list[str]:
    """Return the tensors on disk from which a tensor of transformers is made."""
    return [stored_name for stored_name, target in stored.items() if target == name]


def _split(name: str, layer: int) -> tuple[str, str]:
    """Return the module of all layers and the rest of a tensor's name on disk."""
    where, _, rest = name.partition(f".{layer}.")
    return where, rest


def _mlp_on_disk(stored: Mapping[str, str], prefix: str, layer: int, mlp: Mlp) -> tuple[str, tuple[Projection, ...]]:
    """Return the module of the layers on disk, and the MLP by its names there.
    Raises: ModelError."""
    names, where = [], ""
    for module in (*mlp.inputs, mlp.output):
        tensors = _on_disk(stored, f"{prefix}.{layer}.{module}.weight")
        if len(tensors) != 1:
            raise ModelError(f"{prefix}.{layer}.{module} is stored as {_listed(tensors)}, not as one tensor; {AGAIN}")
        where, rest = _split(tensors[0], layer)
        names.append(rest.removesuffix(".weight"))
    return where, block_table("mlp", names[:-1], names[-1], fused=mlp.is_fused)


def _experts_on_disk(
    model: Any,
    stored: Mapping[str, str],
    shapes: Mapping[str, Sequence[int]],
    prefix: str,
    layer: int,
    experts: Experts,
) -> tuple[str, tuple[Projection, ...], dict[str, tuple[str, ...]]]:
    """Return the module of the layers on disk, the experts by their names there, and tensors that
    stack all experts.

    Stacked experts are described by the names of single ones that transformers would write.
    Raises: ModelError.
    """
    from transformers.core_model_loading import revert_weight_conversion

    modules, stacked, where = dict[str, tuple[str, ...]](), dict[str, tuple[str, ...]](), ""
    for part, parts in (("gate_up_proj", 2), ("down_proj", 1)):
        name = f"{prefix}.{layer}.{experts.module}.{part}"
        tensors = _on_disk(stored, name)
        weight = model.get_parameter(name)
        # gate before up, as in the weight
        written = list(revert_weight_conversion(model, {name: weight}))
        patterns = list(dict.fromkeys(re.sub(r"\.experts\.\d+\.", ".experts.{}.", name) for name in written))
        if len(patterns) != parts or "{}" not in patterns[0]:
            raise ModelError(
                f"{type(model).__name__} stores all experts of a layer in {_listed(written)}, and experts of different "
                "widths require one tensor per expert; prune another model"
            )
        single = tuple(_split(pattern, layer)[1].removesuffix(".weight") for pattern in patterns)
        if not tensors:
            raise ModelError(f"{name} is missing on disk; download the model again")
        where, rest = _split(tensors[0], layer)
        if len(tensors) == 1 and [*shapes[tensors[0]]] == [*weight.shape]:
            stacked[rest] = single
        elif {
            re.sub(r"\.experts\.\d+\.", ".experts.{}.", _split(name_on_disk, layer)[1]) for name_on_disk in tensors
        } != {f"{part}.weight" for part in single}:
            raise ModelError(f"{name} is stored as {_listed(tensors)}, which ddp-vllm does not know; {AGAIN}")
        modules[part] = single
    return where, block_table("experts", modules["gate_up_proj"], modules["down_proj"][0]), stacked


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(short, names[:3])) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "") or "nothing"
