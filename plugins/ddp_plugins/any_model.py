"""Serves narrower MLPs and experts in vLLM's own model classes, whatever the family.

vLLM asks a quantization config for the method of every linear layer and every set of routed
experts, before the layer allocates its weights. Ours sets the sizes of a pruned MLP's layers to
that MLP's width and lets vLLM's own method do the rest; routed experts get
`moe_layer.RaggedExpertsMethod`. Model class, loader, activation and attention are vLLM's. With
`--quantization fp8_per_channel` and the like, vLLM's methods that quantize while they load are
narrowed instead.
"""

import re
import weakref
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import get_current_vllm_config
from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from ddp_plugins.limits import check_adapters, warn_of_new_vllm
from ddp_plugins.padding import channel_block
from ddp_vllm.errors import CheckpointError, SettingError
from ddp_vllm.masks import MASK
from ddp_vllm.remote_code.files import WEIGHTS, checked_tensors
from ddp_vllm.remote_code.tensors import Config
from ddp_vllm.remote_code.widths import METHOD, Widths
from ddp_vllm.tensor_parallel import round_up

Loader = Callable[..., None]
logger = init_logger("vllm.ddp_plugins.any_model")  # vLLM prints only its own loggers' records
_LAYER = re.compile(r".+?\.\d+(?=\.)")


class TrackingLoader(DefaultModelLoader):
    """Two functions of vLLM's loader, which then refuses a model of ours with parameters that no
    tensor was loaded into.

    vLLM does that for models without a quantization config only; widths do not change which
    parameters a checkpoint must have.
    """

    enable_weights_track: bool | None
    _load, _track = DefaultModelLoader.load_weights, DefaultModelLoader.track_weights_loading

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        if model_config.quantization == METHOD and self.enable_weights_track is None:
            self.enable_weights_track = True
        TrackingLoader._load(self, model, model_config)

    def track_weights_loading(
        self, model: torch.nn.Module, loaded_weights: set[str] | None, quantized: bool = False
    ) -> None:
        # the Transformers backend registers some modules twice, and loads them by one of their names
        named = [*model.named_parameters(remove_duplicate=False)]
        if loaded_weights is not None:
            loaded = {id(parameter) for name, parameter in named if name in loaded_weights}
            loaded_weights |= {name for name, parameter in named if id(parameter) in loaded}
        TrackingLoader._track(self, model, loaded_weights, quantized)


for _name in ("load_weights", "track_weights_loading"):
    setattr(DefaultModelLoader, _name, vars(TrackingLoader)[_name])


class WidthsConfig(QuantizationConfig):
    """Chooses the method of each layer by the widths in `config.json`."""

    def __init__(self, widths: Widths) -> None:
        super().__init__()
        self.widths = widths
        self.online: Any = None
        """vLLM's config for weights that it quantizes while it loads them."""
        self.pad_channels_to: int | None = None
        self.mlps, self.experts = self._outputs("mlp"), self._outputs("experts")

    def _outputs(self, block: str) -> dict[str, int]:
        """Return the output projection of each layer's block, in vLLM's names, and the layer's
        index."""
        if block not in self.widths.blocks:
            return {}
        output = self.widths.table.output(block).name.format(0)
        return {f"{self.widths.layers_module}.{index}.{output}": index for index in range(len(self.widths.layers))}

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Follow vLLM's renaming of modules, such as model.language_model.layers in wrappers."""
        self.mlps, self.experts = (hf_to_vllm_mapper.apply_dict(names) for names in (self.mlps, self.experts))

    @property
    def online_quantization_config(self) -> None:
        """None: otherwise vLLM would replace our methods by those of this config, at the dense
        sizes."""

    @online_quantization_config.setter
    def online_quantization_config(self, config: Any) -> None:
        self.online = config

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check the tensors of a local folder before vLLM starts its workers. Raises: WidthsError,
        also for --load-format sharded_state, which has vLLM's names."""
        warn_of_new_vllm()
        self.pad_channels_to = getattr(hf_config, "ddp_pad_channels_to", None)
        if any(Path(model_name).glob(WEIGHTS)):
            self.widths.check(checked_tensors(Path(model_name)))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a linear layer or of routed experts; None for every other layer."""
        if self.online is not None:
            self.online.packed_modules_mapping = self.packed_modules_mapping
        if hasattr(layer, "expert_map_manager") and (sizes := self._expert_sizes(prefix)) is not None:
            from ddp_plugins.moe_layer import RaggedExpertsMethod, check_experts, scales_of

            check_experts(get_current_vllm_config(), self.widths)
            if get_current_vllm_config().lora_config is not None:
                check_adapters()
            return RaggedExpertsMethod(layer.moe_config, sizes, scales_of(self.online, layer, prefix))
        if self.online is not None:
            method = self.online.get_quant_method(layer, prefix)
        else:
            method = UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        if isinstance(layer, LinearBase) and (width := self._width(prefix)) is not None:
            dense = self.widths.dense.intermediate_size
            narrow(method, dense, width, self.pad_channels_to, is_output=prefix in self.mlps)
        return method

    def _expert_sizes(self, prefix: str) -> tuple[int, ...] | None:
        """Return the widths of a layer's routed experts; None for experts that were not pruned."""
        layer = _LAYER.match(f"{prefix}.")
        names = (name for name in self.experts if layer and name.startswith(f"{layer[0]}."))
        index = self.experts.get(next(names, ""))
        return None if index is None else self.widths.layers[index].expert_intermediate_sizes

    def _width(self, prefix: str) -> int | None:
        """Return the width of the pruned MLP that a linear layer belongs to; None for any other
        layer."""
        index_of = {name.rpartition(".")[0]: index for name, index in self.mlps.items()}
        index = index_of.get(prefix.rpartition(".")[0])
        return None if index is None else self.widths.layers[index].intermediate_size or None

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:  # static in vLLM
        """Drop the masks: --load-format runai_streamer reads every safetensors file of the folder."""
        # it searches in names
        names: dict[re.Pattern[str], str | None] = {re.compile(f"^{MASK.pattern}$"): None}
        return QuantizationConfig.get_checkpoint_weight_mapper() | WeightsMapper(orig_to_new_regex=names)

    def get_name(self) -> Any:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Config) -> "WidthsConfig":
        """config: the value of `quantization_config`. Raises: WidthsError."""
        return cls(Widths.of({"quantization_config": config}))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Accept `--quantization` with the methods that quantize while loading.
        Raises: SettingError for others."""
        if hf_quant_cfg.get("quant_method") != METHOD or user_quant in (None, METHOD):
            return None
        if user_quant not in ONLINE_QUANT_SHORTHAND_NAMES:
            raise SettingError(
                f"--quantization {user_quant} requires a checkpoint in that format; this pruned model can be quantized "
                "while it is loaded, with --quantization fp8_per_channel or fp8_per_tensor"
            )
        return METHOD


def narrow(method: Any, dense_width: int, width: int, pad_to: int | None, *, is_output: bool) -> None:
    """Let a method create a layer's weights at the width of its MLP, and zero-pad the tensors that
    it loads.

    dense_width: channels of the dense MLP. pad_to: `ddp_pad_channels_to` of the config.
    is_output: whether the channels are the layer's inputs; otherwise they are its outputs, of gate
        and up together or of one of them.
    """
    create = method.create_weights
    if has_lora := get_current_vllm_config().lora_config is not None:
        check_adapters()

    def create_weights(
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Loader,
    ) -> None:
        num_ranks = 1 if isinstance(layer, ReplicatedLinear) else layer.tp_size
        fields = {"intermediate_size": dense_width, "ddp_pad_channels_to": pad_to}
        align = channel_block(fields, num_ranks, can_pad=not has_lora, on_cpu=current_platform.is_cpu())
        padded = round_up(width, num_ranks * align)
        if has_lora and padded != width:
            raise SettingError(
                f"{layer.prefix} has {width:,} channels, which --tensor-parallel-size {num_ranks} divides only with "
                "padding, but weights with LoRA adapters cannot be padded; serve on one device, or prune with "
                f"--tp {num_ranks}"
            )
        parts, rest = divmod(input_size if is_output else output_size, dense_width)
        if rest or parts not in ((1,) if is_output else (1, 2)):
            raise CheckpointError(
                f"vLLM builds {layer.prefix} for {input_size:,} inputs and {output_size:,} outputs, which does not fit "
                f"the {dense_width:,} channels in config.json; is it the config of another model?"
            )
        padding = partial(padding_loader, width=width, padded=padded, parts=parts, name=layer.prefix)
        own = padded // num_ranks
        if is_output:
            # dense width -> narrow width, of all ranks and of this one
            layer.ddp_narrow = {dense_width: padded, dense_width // num_ranks: own}
            layer.input_size = input_size = padded
            layer.input_size_per_partition = input_size_per_partition = own
        else:
            layer.output_size, layer.output_size_per_partition = parts * padded, parts * own
            layer.output_partition_sizes = [own] * parts if len(output_partition_sizes) > 1 else [parts * own]
            if hasattr(layer, "output_sizes"):
                layer.output_sizes = [padded] * len(layer.output_sizes)
            output_size, output_partition_sizes = layer.output_size, layer.output_partition_sizes
            # vLLM gives it to the bias, which is made next
            layer.weight_loader = padding(layer.weight_loader, axis=0)
        create(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            weight_loader=padding(weight_loader, axis=int(is_output)),
        )

    method.create_weights = create_weights
    if is_output:
        finish = method.process_weights_after_loading

        def process_weights_after_loading(layer: Any) -> None:
            fit_sizes(layer)
            finish(layer)

        method.process_weights_after_loading = process_weights_after_loading


def _remember_parent(parent: torch.nn.Module, _: str, module: Any) -> None:
    if hasattr(module, "ddp_narrow"):
        module.ddp_parent = weakref.ref(parent)


register_module_module_registration_hook(_remember_parent)


def fit_sizes(output: Any) -> None:
    """Give the MLP of this output projection its narrow width in the attributes that equal its dense
    one: Falcon-H1's class scales as many of its activations as such an attribute states."""
    mlp, narrow = output.ddp_parent(), output.ddp_narrow
    sizes = {name: value for name, value in vars(mlp).items() if type(value) is int and value in narrow}
    vars(mlp).update({name: narrow[value] for name, value in sizes.items()})
    output.ddp_narrow = {}  # weights may be loaded again, and a narrow width may equal another dense one


def padding_loader(load: Loader, width: int, padded: int, parts: int, *, axis: int, name: str) -> Loader:
    """Return a loader that zero-pads a tensor from `width` to `padded` channels along `axis` and
    then calls `load`.

    parts: 2 if the layer holds gate and up. A tensor of both, without a shard id, is padded part by
        part.
    Raises: CheckpointError for a tensor of another length.
    """

    @wraps(load)
    def load_padded(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *shard: Any) -> None:
        is_part = bool(shard) and isinstance(shard[0], int)
        length, num_parts = loaded_weight.shape[axis], 1 if is_part else parts
        if length == num_parts * width:
            channels = loaded_weight.unflatten(axis, (num_parts, width))
            missing = list(channels.shape)
            missing[axis + 1] = padded - width
            if padded > width:
                loaded_weight = torch.cat((channels, channels.new_zeros(missing)), axis + 1).flatten(axis, axis + 1)
        elif not (is_part and length == padded):  # vLLM hands over the padded halves of a fused bias again
            raise CheckpointError(
                f"{name}: a tensor of shape {list(loaded_weight.shape)} was loaded, but config.json requires "
                f"{num_parts * width} along axis {axis}; config.json and the weights are of different checkpoints"
            )
        load(param, loaded_weight, *shard)

    return load_padded
