"""Configurations of pruned models: each dense family's configuration plus `ddp_layers`.

Every stock field keeps its dense value (transformers and vLLM read them as integers).
This file is part of every checkpoint and imports transformers, but not torch.
"""

import copy
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from .tensors import FAMILIES, MODEL_TYPE_PREFIX
from .widths import Widths

if int(transformers.__version__.partition(".")[0]) < 5:  # older configurations are not dataclasses
    raise ImportError(f"a pruned checkpoint requires transformers 5.16 or newer; this is {transformers.__version__}")


class LayerConfigs(list[Any]):
    """The configs of layers by index, or by the type of a layer, as transformers' scaled positions
    ask for them: those of all layers of a type state the same positions."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self[0].layer_types.index(key) if isinstance(key, str) else key)


@dataclass(kw_only=True, repr=False, eq=False)
class NonUniformConfig:
    """Mixin that adds the widths of each layer to a dense family's configuration.

    Raises: WidthsError (a ValueError) if the widths contradict the dense fields.
    """

    ddp_layers: list[dict[str, Any]] | None = None
    """The widths of every layer; None for the dense model."""

    @property
    def widths(self) -> Widths:
        """The parsed widths, without regard to quantization, which may be applied to plain weights
        while they load. Raises: WidthsError."""
        model_type = type(self).model_type  # type: ignore[attr-defined]
        return Widths.of(vars(self) | {"model_type": model_type, "quantization_config": None})

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        fields = vars(self)
        # families without the field derive it from the number of heads
        if fields.get("head_dim") is None:
            self.head_dim = fields["hidden_size"] // fields["num_attention_heads"]
        if fields.get("ddp_layers") is not None:
            _ = self.widths

    # vLLM's Transformers backend serves pruned models without ddp-vllm. It reads the heads of each
    # layer from a config with is_heterogeneous. For transformers itself the fields keep the values
    # of the dense model.
    allow_global_per_layer_attribute_access = True

    @property
    def is_heterogeneous(self) -> bool:
        return vars(self).get("ddp_layers") is not None

    @property
    def per_layer_config(self) -> Any:
        """One config per layer with its own numbers of heads, at least 1: vLLM requires attention
        in every layer."""
        if not self.is_heterogeneous:
            return super().per_layer_config  # type: ignore[misc]
        configs = LayerConfigs()
        for layer in self.widths.layers:
            own = copy.copy(self)
            own.ddp_layers = None
            own.num_key_value_heads = max(1, layer.num_kv_heads)  # type: ignore[attr-defined]
            queries = own.num_key_value_heads * max(layer.query_heads_per_kv_head, default=1)  # type: ignore[attr-defined]
            own.num_attention_heads = queries  # type: ignore[attr-defined]
            configs.append(own)
        return configs

    @per_layer_config.setter
    def per_layer_config(self, stated: Any) -> None:
        """Ignore widths that config.json states in this way too; those of `ddp_layers` count."""

    def _update_heterogeneous_to_dict_output(self, saved: dict[str, Any]) -> None:
        """Save only `ddp_layers`, from which the configs per layer are derived."""


def _logit_scale(config: Any) -> float:
    """Return the factor for logits in vLLM's Transformers backend; transformers divides them by
    `logits_scaling`."""
    return 1 / config.logits_scaling if config._attn_implementation == "vllm" else 1.0


_MORE: dict[str, dict[str, Any]] = {"granite": {"logit_scale": property(_logit_scale)}}
CONFIGS: tuple[Any, ...] = tuple(
    type(
        f"DDP{name}Config",
        (NonUniformConfig, CONFIG_MAPPING[model_type]),
        {"model_type": f"{MODEL_TYPE_PREFIX}{model_type}", "__module__": __name__, **_MORE.get(model_type, {})},
    )
    for model_type, name in FAMILIES.items()
)
"""The configuration of each family."""
globals().update({config.__name__: config for config in CONFIGS})


def __getattr__(name: str) -> Any:  # for type checkers: the classes are made above
    raise AttributeError(name)
