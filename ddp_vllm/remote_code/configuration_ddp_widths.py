"""Loads a stock model with narrower MLPs and experts in transformers, whatever the family.

`AutoConfig` finds `AnyConfig` by the `auto_map` of config.json. It registers a quantizer for the
`quant_method` of the same file and returns the stock configuration; so the model is the stock
class. Before its weights are loaded, the quantizer replaces the linear layers and experts that were
pruned by narrower ones. Nothing is quantized: transformers lets only a quantizer change modules at
that point. This file is part of every checkpoint of such a family.
Legend of shape suffixes: T tokens, H hidden size, K experts per token, S = T·K routed pairs.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
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


class WidthsConfig(QuantizationConfigMixin):
    """The `quantization_config` of a model whose MLPs or experts were pruned.
    Raises: WidthsError."""

    quant_method = METHOD

    def __init__(self, **stated: Any) -> None:
        self.widths = ModuleWidths.parse(stated)

    def to_dict(self) -> dict[str, Any]:
        return self.widths.to_json()


class RaggedExperts(nn.Module):
    """Routed experts of different widths: one module per expert, named by its id; a removed expert
    has none."""

    def __init__(self, stock: Any, block: Block, sizes: Sequence[int]) -> None:
        super().__init__()
        # the activation of some families has settings of its own
        self.__dict__.update({name: value for name, value in vars(stock).items() if not name.startswith("_")})
        self.act_fn, self.apply_gate = getattr(stock, "act_fn", None), getattr(type(stock), "_apply_gate", _gated)
        self.num_experts, self.kept = len(sizes), [expert for expert, size in enumerate(sizes) if size]
        *self.inputs, self.output = (name.rpartition(".")[2] for name in block.projections)
        down = stock.down_proj
        hidden_size = down.shape[-1 if getattr(stock, "is_transposed", False) else 1]
        where = {"device": down.device, "dtype": down.dtype, "bias": getattr(stock, "has_bias", False)}
        for expert in self.kept:
            rows = sizes[expert] * block.rows_per_channel
            projections = {name: nn.Linear(hidden_size, rows, **where) for name in self.inputs}
            projections[self.output] = nn.Linear(sizes[expert], hidden_size, **where)
            self.add_module(str(expert), nn.ModuleDict(projections))

    def forward(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's expert outputs times their routing weights; removed
        experts add nothing."""
        sum_TH = torch.zeros_like(x_TH, dtype=torch.float32)
        symbolic = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        chosen = None if symbolic else self._chosen(ids_TK)
        for number in self.kept:
            # in eager mode this torch.where would synchronize with the GPU once per expert
            tokens, slots = chosen[number] if chosen else torch.where(ids_TK == number)
            # in training every expert gets a gradient, possibly zero; compiled code cannot branch
            # on a length
            if not torch.is_grad_enabled() and not torch.compiler.is_compiling() and len(tokens) == 0:
                continue
            expert: Any = self.get_submodule(str(number))
            x = x_TH[tokens]
            y = expert[self.output](self.apply_gate(self, torch.cat([expert[name](x) for name in self.inputs], -1)))
            sum_TH.index_add_(0, tokens, (y * weights_TK[tokens, slots, None]).float())
        return sum_TH.to(x_TH.dtype)

    def _chosen(self, ids_TK: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return for each expert the tokens routed to it, ascending, and their slot among the K
        choices."""
        experts_S, order_S = ids_TK.flatten().sort(stable=True)
        pairs = order_S.split(torch.bincount(experts_S, minlength=self.num_experts).tolist())
        return [(pair // ids_TK.shape[1], pair % ids_TK.shape[1]) for pair in pairs]


def _gated(experts: RaggedExperts, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return experts.act_fn(gate) * up  # type: ignore[misc]


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
        widths.check(chain.from_iterable(file_tensors(Path(path)) for path in checkpoint_files or ()))
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
                    model.set_submodule(
                        module, RaggedExperts(model.get_submodule(module), widths.experts, sizes or dense)
                    )
                elif sizes is not None:
                    raise WidthsError(
                        f"the model has no routed experts {names[-1]}; is it the config of another model?"
                    )
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """Keep the experts apart: transformers would stack them."""
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
