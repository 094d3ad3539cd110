"""Loads a stock model with narrower MLPs and experts in transformers, whatever the family.

`AutoConfig` finds `AnyConfig` by the `auto_map` of config.json. It registers a quantizer for the
`quant_method` of the same file and returns the stock configuration; so the model is the stock
class. Before its weights are loaded, the quantizer replaces the linear layers and experts that were
pruned by narrower ones. Nothing is quantized: transformers lets only a quantizer change modules at
that point. This file is part of every checkpoint of such a family.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.conversion_mapping import WeightConverter, WeightRenaming, get_model_conversion_mapping
from transformers.core_model_loading import rename_source_key
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .files import WidthsError, file_tensors
from .ragged_experts import RaggedExperts
from .tensors import Projection
from .widths import AGAIN, METHOD, Widths


class WidthsConfig(QuantizationConfigMixin):
    """The `quantization_config` of a model whose MLPs or experts were pruned.
    Raises: WidthsError."""

    quant_method = METHOD

    def __init__(self, **stated: Any) -> None:
        self.widths = Widths.of({"quantization_config": stated})

    def to_dict(self) -> dict[str, Any]:
        return self.widths.to_json()


class WidthsQuantizer(HfQuantizer):
    """Replaces the modules that were pruned by narrower ones before the weights are loaded."""

    quantization_config: WidthsConfig

    def __init__(self, quantization_config: WidthsConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # otherwise transformers ignores the `dtype` of tensors that it renames
        self.pre_quantized = False
        self.merging: set[str] = set()
        """Patterns of names on disk that transformers would merge into one tensor for all experts
        of a layer."""

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        """Raises: WidthsError if the tensors on disk, or the modules of the model, do not fit the
        widths."""
        widths = self.quantization_config.widths
        tensors = [tensor for path in checkpoint_files or () for tensor in file_tensors(Path(path))]
        widths.check(tensors)
        check_present(model, widths, [name for name, *_ in tensors])
        rename, present, table = renaming(model), model.state_dict(), widths.table
        for index, layer in enumerate(widths.layers):
            names = dict[Projection, str]()
            for part in table.projections:
                names[part], merged = rename(f"{widths.layers_module}.{index}.{part.name.format(0)}.weight")
                self.merging |= {merged} if merged else set()
                if part.block == "mlp" and layer.intermediate_size:
                    narrow(model, names[part], part, layer.intermediate_size, widths.dense.intermediate_size)
            if not widths.num_experts:
                continue
            parts, sizes = (*table.inputs("experts"), table.output("experts")), layer.expert_intermediate_sizes
            # all experts, because transformers converts the names of all or none
            if (name := names[parts[-1]]) in present:
                module, rows = name.rpartition(".")[0], len(parts[0].units)
                *inputs, output = (part.name.rpartition(".")[2] for part in parts)
                stock, dense = model.get_submodule(module), widths.dense.expert_intermediate_sizes or ()
                model.set_submodule(module, RaggedExperts(stock, sizes or dense, inputs, output, rows))
            elif sizes is not None:
                raise WidthsError(f"the model has no routed experts {name}; is it the config of another model?")
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def update_weight_conversions(self, weight_conversions: list[Any], *_: Any) -> list[Any]:
        """Keep the experts apart: transformers would stack them. Version 5.24 also passes the
        model."""
        return [rule for rule in weight_conversions if not self.merging & {*getattr(rule, "source_patterns", ())}]

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        """Refuse tensors of other shapes, which transformers accepts in quantized models.
        Raises: WidthsError."""
        for name, tensor in model.state_dict().items():
            if tensor.shape != self.shapes.get(name, tensor.shape):
                raise WidthsError(
                    f"tensor {name} has shape {list(tensor.shape)}, but the model requires {list(self.shapes[name])}; "
                    "config.json and the weights are of different checkpoints"
                )
        model.is_quantized = False  # otherwise trainers refuse it

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def renaming(model: Any) -> Callable[[str], tuple[str, str | None]]:
    """Return transformers' rule for names: a tensor on disk -> its name in the model, and the
    pattern of those that are merged with it."""
    rules = get_model_conversion_mapping(model)
    kinds = [[rule for rule in rules if isinstance(rule, kind)] for kind in (WeightRenaming, WeightConverter)]
    return partial(
        rename_source_key, weight_renamings=kinds[0], weight_converters=kinds[1],
        base_model_prefix=model.base_model_prefix, meta_state_dict=model.state_dict(),
    )  # fmt: skip


def check_present(model: Any, widths: Widths, stored: Iterable[str]) -> None:
    """Refuse a checkpoint that lacks a tensor of the dense model outside of the blocks that were
    pruned, whose tensors the widths know. transformers would initialize it at random.

    stored: the names on disk. Raises: WidthsError.
    """
    rename, tied = renaming(model), model.all_tied_weights_keys
    parts = [part.name.format(0) for part in widths.table.projections]
    pruned = [f"{widths.layers_module}.{layer}.{part}.weight" for layer in range(len(widths.layers)) for part in parts]
    present = {rename(name)[0] for name in (*stored, *pruned)}
    present |= {*map(tied.get, present & tied.keys()), *(name for name, source in tied.items() if source in present)}
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_missing or ["^$"]))
    if lacking := [name for name in model.state_dict() if name not in present and not ignored.search(name)]:
        raise WidthsError(f"tensor {min(lacking)} is missing ({len(lacking)} in all); {AGAIN}")


def narrow(model: Any, weight: str, projection: Projection, width: int, dense_width: int) -> None:
    """Replace a linear layer of an MLP by one with `width` channels. Raises: WidthsError if there
    is none."""
    name, rows = weight.removesuffix(".weight"), len(projection.units)
    dense = dict(model.named_modules()).get(name)
    length = (dense.out_features, dense.in_features)[projection.axis] if isinstance(dense, nn.Linear) else 0
    if not isinstance(dense, nn.Linear) or length != rows * dense_width:
        raise WidthsError(
            f"the model has no linear layer {name} of {rows * dense_width:,} channels; is it another model?"
        )
    sizes = (width, dense.out_features) if projection.axis else (dense.in_features, rows * width)
    where: Any = {"device": dense.weight.device, "dtype": dense.weight.dtype, "bias": dense.bias is not None}
    model.set_submodule(name, nn.Linear(*sizes, **where))


class AnyConfig(PretrainedConfig):
    """Stands for the stock configuration, which it returns."""

    model_type = METHOD

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        fields, rest = PretrainedConfig.get_config_dict(pretrained_model_name_or_path, **kwargs)
        fields.pop("auto_map", None)  # the stock class runs, and saves itself as such
        for name in ("trust_remote_code", "code_revision", "name_or_path", "_from_auto"):
            rest.pop(name, None)
        register_widths()
        return CONFIG_MAPPING[fields["model_type"]].from_dict(fields, **rest)


def register_widths() -> None:
    """Let transformers load models whose MLPs or experts were pruned; safe to call again."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, WidthsConfig)
    AUTO_QUANTIZER_MAPPING.setdefault(METHOD, WidthsQuantizer)
