"""Loads a stock model with narrower MLPs and experts in transformers, whatever the family.

`AutoConfig` finds `AnyConfig` by the `auto_map` of config.json. It registers a quantizer for the
`quant_method` of the same file and returns the stock configuration; so the model is the stock
class. Before its weights are loaded, the quantizer replaces the linear layers and experts that were
pruned by narrower ones. Nothing is quantized: transformers lets only a quantizer change modules at
that point. This file is part of every checkpoint of such a family.
"""

from itertools import chain
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
from .module_widths import METHOD, Block, ModuleWidths
from .ragged_experts import RaggedExperts


class WidthsConfig(QuantizationConfigMixin):
    """The `quantization_config` of a model whose MLPs or experts were pruned.
    Raises: WidthsError."""

    quant_method = METHOD

    def __init__(self, **stated: Any) -> None:
        self.widths = ModuleWidths.parse(stated)

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
        files = (file_tensors(Path(path)) for path in checkpoint_files or ())
        # of an overlay, as transformers reads them, the last copy counts
        widths.check({tensor[0]: tensor for tensor in chain.from_iterable(files)}.values())
        conversions, present = get_model_conversion_mapping(model), model.state_dict()
        renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in conversions if isinstance(rule, WeightConverter)]

        def place(module: str) -> str:
            """Return the name in the model of a module's weight on disk."""
            shared = (renamings, converters, model.base_model_prefix, present)
            name, pattern = rename_source_key(f"{module}.weight", *shared)
            self.merging |= {pattern} if pattern else set()
            return name

        for index, layer in enumerate(widths.layers):
            prefix = f"{widths.layers_module}.{index}."
            if widths.mlp and layer.intermediate_size is not None:
                for projection in widths.mlp.projections:
                    is_output = projection == widths.mlp.output
                    narrow(model, place(prefix + projection), widths.mlp, layer.intermediate_size, is_output=is_output)
            if widths.experts:
                names = [place(prefix + projection.format(0)) for projection in widths.experts.projections]
                sizes = layer.expert_intermediate_sizes
                # all experts, because transformers converts the names of all or none
                if names[-1] in present:
                    dense = (widths.experts.intermediate_size,) * widths.experts.num_experts
                    module = names[-1].rpartition(".")[0]
                    *inputs, output = (name.rpartition(".")[2] for name in widths.experts.projections)
                    rows, stock = widths.experts.rows_per_channel, model.get_submodule(module)
                    model.set_submodule(module, RaggedExperts(stock, sizes or dense, inputs, output, rows))
                elif sizes is not None:
                    raise WidthsError(
                        f"the model has no routed experts {names[-1]}; is it the config of another model?"
                    )
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


def narrow(model: Any, weight: str, block: Block, width: int, *, is_output: bool) -> None:
    """Replace a linear layer of an MLP by one with `width` channels. Raises: WidthsError if there
    is none."""
    name = weight.removesuffix(".weight")
    dense = dict(model.named_modules()).get(name)
    channels = block.intermediate_size * (1 if is_output else block.rows_per_channel)
    if not isinstance(dense, nn.Linear) or channels != (dense.in_features if is_output else dense.out_features):
        raise WidthsError(f"the model has no linear layer {name} of {channels:,} channels; is it another model?")
    inputs, outputs = dense.in_features, width * block.rows_per_channel
    sizes = (width, dense.out_features) if is_output else (inputs, outputs)
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
