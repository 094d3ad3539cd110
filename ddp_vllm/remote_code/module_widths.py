"""Parses the widths of MLPs and experts in a checkpoint of any family, and checks the tensors
against them.

The folder has the stock model's own `config.json`, in which every size is the dense one, and one
more key:

    "quantization_config": {
      "quant_method": "ddp_widths",
      "layers_module": "model.layers",
      "mlp":     {"inputs": ["mlp.gate_proj", "mlp.up_proj"], "output": "mlp.down_proj", "intermediate_size": 256},
      "experts": {"inputs": ["mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"],
                  "output": "mlp.experts.{}.down_proj", "intermediate_size": 64, "num_experts": 8},
      "layers":  [{"intermediate_size": 96}, {"expert_intermediate_sizes": [64, 0, 33, …]}, {}, …]
    }

vLLM and transformers both look for a quantization method there, which may build each linear layer
as it likes. All names are those of the tensors on disk. `layers` has one entry per decoder layer;
what an entry does not state is dense. Two `inputs` are gate and up projection, in this order. One
input is the only projection of an MLP without a gate, unless `fused` is present: then it holds gate
and up rows, as `halves` or `interleaved`. An expert of width 0 has no tensors. An MLP keeps at
least one channel: a linear layer without inputs is not portable.

This file is part of every checkpoint and imports only the standard library and `files`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .files import WidthsError, short

METHOD = "ddp_widths"
FUSED = ("halves", "interleaved")
# and experts per layer; far above any model, because lists of that length are allocated
MOST_LAYERS = 10_000
LARGEST_WIDTH = 10_000_000
FLOATS = {"BF16", "F16", "F32", "F64", *(f"torch.{name}" for name in ("bfloat16", "float16", "float32", "float64"))}
_NAME = re.compile(r"\w+(\.\w+)*")
_AGAIN = "run ddp-vllm apply again"


@dataclass(frozen=True, kw_only=True)
class Block:
    """The MLPs, or the routed experts, of all layers that were pruned: their names on disk and
    their dense size."""

    inputs: tuple[str, ...]
    """Modules whose rows compute the channels, relative to the layer; `{}` stands for the id of an
    expert."""
    output: str
    """Module whose columns read the channels and which writes to the residual stream."""
    intermediate_size: int
    """Channels of the dense MLP or of one dense expert."""
    num_experts: int = 0
    """Routed experts per layer; 0 for MLPs."""
    fused: str = ""
    """How the one input holds gate and up rows, one of `FUSED`; "" if it does not."""

    @property
    def rows_per_channel(self) -> int:
        """Rows of an input projection that compute one channel."""
        return 2 if self.fused else 1

    @property
    def projections(self) -> tuple[str, ...]:
        """All modules, the output last."""
        return (*self.inputs, self.output)

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"inputs": list(self.inputs), "output": self.output}
        entry["intermediate_size"] = self.intermediate_size
        return entry | {key: value for key in ("num_experts", "fused") if (value := getattr(self, key))}


@dataclass(frozen=True, kw_only=True)
class LayerChannels:
    """The kept channels of one decoder layer; None: as dense, or the layer has no such block."""

    intermediate_size: int | None = None
    expert_intermediate_sizes: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        sizes = {"intermediate_size": self.intermediate_size}
        experts = self.expert_intermediate_sizes
        sizes |= {"expert_intermediate_sizes": None if experts is None else list(experts)}  # type: ignore[dict-item]
        return {key: value for key, value in sizes.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A tensor of a pruned block."""

    block: Block
    layer: int
    expert: int
    """The expert's id; 0 in an MLP."""
    is_output: bool
    is_bias: bool
    width: int | None
    """Kept channels of this MLP or expert; None if its layer is left as it is."""


@dataclass(frozen=True, kw_only=True)
class ModuleWidths:
    """The widths of all layers, and the names of the tensors they apply to."""

    layers_module: str
    """Module of the decoder layers, such as model.layers."""
    layers: tuple[LayerChannels, ...]
    mlp: Block | None = None
    experts: Block | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModuleWidths":
        """Read the fields of a `config.json`. Raises: WidthsError as `parse`, also if the layers'
        number differs."""
        if (stated := stated_widths(config)) is None:
            raise WidthsError(f"config.json: quantization_config has no quant_method {METHOD!r}; prune the model first")
        widths = cls.parse(stated)
        text = config.get("text_config")
        num_layers = (text if isinstance(text, Mapping) else config).get("num_hidden_layers")
        if type(num_layers) is int and num_layers != len(widths.layers):
            raise WidthsError(
                f"config.json: quantization_config.layers has {len(widths.layers)} entries for {num_layers} layers; "
                f"{_AGAIN}"
            )
        return widths

    @classmethod
    def parse(cls, stated: Mapping[str, Any]) -> "ModuleWidths":
        """Read the value of `quantization_config`. Raises: WidthsError, naming the key, its value
        and its limit."""
        _check_keys(stated, "", {"quant_method", "layers_module", "mlp", "experts", "layers"})
        blocks = {name: _parse_block(name, stated[name]) for name in ("mlp", "experts") if stated.get(name) is not None}
        layers = stated.get("layers")
        if not isinstance(layers, Sequence) or isinstance(layers, str) or not 0 < len(layers) <= MOST_LAYERS:
            raise _fault("layers", layers, f"not a list of 1 to {MOST_LAYERS:,} layers")
        return cls(
            layers_module=_name(stated.get("layers_module"), "layers_module"),
            layers=tuple(_parse_layer(f"layers[{index}]", entry, blocks) for index, entry in enumerate(layers)),
            **blocks,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the value of `quantization_config`, which `parse` reads."""
        blocks = {name: block.to_json() for name in ("mlp", "experts") if (block := getattr(self, name))}
        return {
            "quant_method": METHOD,
            "layers_module": self.layers_module,
            **blocks,
            "layers": [layer.to_json() for layer in self.layers],
        }

    def find(self, name: str) -> Projection | None:
        """Return which tensor of a pruned block `name` is; None for any other tensor.

        name: as on disk, ending in .weight or .bias. Raises: WidthsError for an expert that the
            model does not have.
        """
        if not name.startswith(f"{self.layers_module}."):
            return None
        number, _, rest = name.removeprefix(f"{self.layers_module}.").partition(".")
        module, _, kind = rest.rpartition(".")
        # a layer past the last is a head that predicts further tokens, and is left as it is
        if kind not in ("weight", "bias") or not number.isdecimal() or int(number) >= len(self.layers):
            return None
        layer = self.layers[int(number)]
        for block in filter(None, (self.mlp, self.experts)):
            for projection in block.projections:
                before, is_expert, after = projection.partition("{}")
                expert = module[len(before) : len(module) - len(after)] if is_expert else "0"
                if not (module.startswith(before) and module.endswith(after) and expert.isdecimal()) or (
                    not is_expert and module != before
                ):
                    continue
                width = layer.intermediate_size
                if block.num_experts:
                    sizes = layer.expert_intermediate_sizes
                    if int(expert) >= block.num_experts:
                        raise WidthsError(
                            f"tensor {short(name)} is of expert {expert}, but config.json has {block.num_experts}; "
                            f"{_AGAIN}"
                        )
                    width = None if sizes is None else sizes[int(expert)]
                return Projection(
                    block=block,
                    layer=int(number),
                    expert=int(expert),
                    is_output=projection == block.output,
                    is_bias=kind == "bias",
                    width=width,
                )
        return None

    def expected(self, name: str) -> tuple[int, int] | None:
        """Return the axis of a tensor that pruning shortens and its length; None for an unchanged
        tensor.

        name: as on disk. Tensors of a removed expert have length 0. Raises: WidthsError as `find`.
        """
        found = self.find(name)
        if found is None or found.width is None:
            return None
        if not found.is_output:
            return 0, found.width * found.block.rows_per_channel
        # its bias is as long as the output
        return (1, found.width) if not found.is_bias or not found.width else None

    def shape(self, name: str, dense: Sequence[int]) -> list[int]:
        """Return the shape on disk of a tensor that has shape `dense` in the dense model."""
        shape = list(dense)
        if expected := self.expected(name):
            shape[expected[0]] = expected[1]
        return shape

    def check(self, tensors: Iterable[tuple[str, Sequence[int], str]]) -> None:
        """Refuse a folder whose tensors do not have these widths.

        tensors: name, shape and dtype of every tensor of the folder, as safetensors or torch write
            it.
        Raises: WidthsError, naming the tensor, its length and the required length.
        """
        missing = self.required()
        hidden: dict[Block, int] = {}
        for name, shape, dtype in tensors:
            missing.discard(name)
            found = self.find(name)
            if found is None:
                continue
            if dtype not in FLOATS:
                raise WidthsError(
                    f"tensor {name} is {short(dtype)}: widths are served with floating-point weights only; export the "
                    "unquantized model"
                )
            if found.width == 0 and 0 not in shape:
                raise WidthsError(f"tensor {name} is of an expert that config.json removes; {_AGAIN}")
            if found.is_output and found.is_bias:
                continue
            width = found.block.intermediate_size if found.width is None else found.width
            required = width * (1 if found.is_output else found.block.rows_per_channel)
            axis = 1 if found.is_output else 0
            if found.width is not None and (len(shape) != 2 - found.is_bias or shape[axis] != required):
                raise WidthsError(
                    f"tensor {name} has shape {list(shape)}, but config.json requires {required} along axis {axis}; "
                    "config.json and the weights are of different checkpoints"
                )
            if len(shape) == 2 and hidden.setdefault(found.block, shape[1 - axis]) != shape[1 - axis]:
                raise WidthsError(
                    f"tensor {name} has shape {list(shape)}, but other layers have {hidden[found.block]} along axis "
                    f"{1 - axis}; copy the whole folder again"
                )
        if missing:
            raise WidthsError(
                f"tensor {min(missing)} is missing ({len(missing)} in all); copy the whole folder, or {_AGAIN}"
            )

    def required(self) -> set[str]:
        """Return the names of the weights on disk of all pruned MLPs and experts."""
        names: set[str] = set()
        for index, layer in enumerate(self.layers):
            if layer.intermediate_size is not None and self.mlp:
                names.update(f"{self.layers_module}.{index}.{part}.weight" for part in self.mlp.projections)
            for expert, width in enumerate(layer.expert_intermediate_sizes or ()):
                if width and self.experts:
                    parts = (part.format(expert) for part in self.experts.projections)
                    names.update(f"{self.layers_module}.{index}.{part}.weight" for part in parts)
        return names


def stated_widths(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the description of the widths in a `config.json`; None if it has none."""
    stated = config.get("quantization_config")
    return stated if isinstance(stated, Mapping) and stated.get("quant_method") == METHOD else None


def states_widths(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` states widths in this form."""
    return stated_widths(config) is not None


def _parse_block(name: str, stated: Any) -> Block:
    if not isinstance(stated, Mapping):
        raise _fault(name, stated, "not an object")
    is_mlp = name == "mlp"
    _check_keys(
        stated,
        f"{name}.",
        {"inputs", "output", "intermediate_size", "fused"} | (set() if is_mlp else {"num_experts"}),
    )
    inputs, fused = stated.get("inputs"), stated.get("fused", "")
    if not isinstance(inputs, list | tuple) or not 1 <= len(inputs) <= 2:
        raise _fault(f"{name}.inputs", inputs, "not a list of one or two modules")
    if fused not in ("", *FUSED) or (fused and len(inputs) > 1):
        raise _fault(f"{name}.fused", fused, f"not {' or '.join(FUSED)} of one input")
    block = Block(
        inputs=tuple(_name(part, f"{name}.inputs[{i}]", expert=not is_mlp) for i, part in enumerate(inputs)),
        output=_name(stated.get("output"), f"{name}.output", expert=not is_mlp),
        intermediate_size=_integer(stated.get("intermediate_size"), f"{name}.intermediate_size", 1, LARGEST_WIDTH),
        num_experts=0 if is_mlp else _integer(stated.get("num_experts"), f"{name}.num_experts", 1, MOST_LAYERS),
        fused=fused,
    )
    if len({*block.projections}) < len(block.projections):
        raise _fault(name, list(block.projections), "names a module twice")
    return block


def _parse_layer(where: str, stated: Any, blocks: Mapping[str, Block]) -> LayerChannels:
    if not isinstance(stated, Mapping):
        raise _fault(where, stated, "not an object")
    _check_keys(stated, f"{where}.", {"intermediate_size", "expert_intermediate_sizes"})
    width, sizes = stated.get("intermediate_size"), stated.get("expert_intermediate_sizes")
    for block, value in (("mlp", width), ("experts", sizes)):
        if value is not None and block not in blocks:
            raise _fault(where, dict(stated), f"requires {block} in the quantization_config")
    if width is not None:
        width = _integer(width, f"{where}.intermediate_size", 1, blocks["mlp"].intermediate_size)
    if sizes is not None:
        where, experts = f"{where}.expert_intermediate_sizes", blocks["experts"]
        if not isinstance(sizes, list | tuple) or len(sizes) != experts.num_experts:
            raise _fault(where, sizes, f"not a list of {experts.num_experts} widths, one per expert")
        sizes = tuple(_integer(size, f"{where}[{i}]", 0, experts.intermediate_size) for i, size in enumerate(sizes))
    return LayerChannels(intermediate_size=width, expert_intermediate_sizes=sizes)


def _check_keys(stated: Mapping[str, Any], prefix: str, known: set[str]) -> None:
    if unknown := set(stated) - known:
        raise WidthsError(
            f"config.json: quantization_config has the unknown key {short(prefix + min(map(str, unknown)))}; "
            "update ddp-vllm"
        )


def _name(value: Any, where: str, *, expert: bool = False) -> str:
    if not isinstance(value, str) or (expert and value.count("{}") != 1) or len(value) > 200:
        raise _fault(where, value, "not the name of a module" + (" with {} for the expert" if expert else ""))
    if not _NAME.fullmatch(value.replace("{}", "0") if expert else value):
        raise _fault(where, value, "not the name of a module")
    return value


def _integer(value: Any, where: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _fault(where, value, f"not an integer in {low}…{high:,}")
    return value


def _fault(where: str, value: Any, fault: str) -> WidthsError:
    return WidthsError(f"config.json: quantization_config.{where} is {short(value)}, {fault}; {_AGAIN}")
