"""Defines which tensors pruning changes, per family: the table used to check, cut, pad and price
weights.

A projection has units along one axis of its weight: its rows compute them (axis 0) or its columns
read them (axis 1). A unit is a query head, a KV head or an MLP channel. When all units of a block
are removed, its norms are removed too.

This file is part of every checkpoint and imports only the standard library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Config = Mapping[str, Any]
"""The fields of a `config.json`."""
Shapes = Mapping[str, list[int]]
"""The shapes of tensors by their names."""
LAYERS = "model.layers"
"""Module with the decoder layers of every family, on disk and in transformers."""
MODEL_TYPE_PREFIX = "ddp_"
BLOCK_OF = {"query_head": "attn", "kv_head": "attn", "channel": "mlp", "expert_channel": "experts"}
"""Unit -> its block, which is also the module type of its masks."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One linear layer whose weight `[out, in]` has units along `axis`."""

    name: str
    """Module on disk, relative to its decoder layer."""
    axis: int
    """0 if units are outputs, whose bias is cut too; 1 if they are inputs."""
    units: tuple[str, ...]
    """Kinds of units along the axis, in order; all units of one kind precede those of the next."""

    @property
    def block(self) -> str:
        """`attn`, `mlp` or `experts`."""
        return BLOCK_OF[self.units[0]]

    def unit_size(self, head_dim: int) -> int:
        """Return the length of one unit along the axis."""
        return head_dim if self.block == "attn" else 1


@dataclass(frozen=True, kw_only=True)
class TensorTable:
    """The modules of a decoder layer of one family, and which of them pruning changes."""

    projections: tuple[Projection, ...]
    norms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Block -> the norms that are removed with it."""
    untouched: tuple[str, ...] = ()
    """Modules that every layer must have and pruning does not change."""
    biases: tuple[str, ...] = ()
    """Projections that always have a bias."""
    is_tied: bool = False
    """Whether the output head is the embedding if the config does not state it."""

    def output(self, block: str) -> Projection:
        """Return the projection with which a block writes to the residual stream; gates scale its
        input."""
        return next(each for each in self.projections if each.block == block and each.axis == 1)

    def inputs(self, block: str) -> tuple[Projection, ...]:
        """Return the projections that compute a block's units."""
        return tuple(each for each in self.projections if each.block == block and each.axis == 0)

    def find(self, module: str) -> Projection | None:
        """Return the projection named `module`, relative to its layer."""
        return next((projection for projection in self.projections if projection.name == module), None)

    def knows(self, module: str) -> bool:
        """Return whether a layer may have a module of that name, relative to it."""
        norms = (norm for names in self.norms.values() for norm in names)
        return module in (*self.untouched, *norms) or self.find(module) is not None


def _rows(name: str, *units: str) -> Projection:
    return Projection(name=name, axis=0, units=units)


def _columns(name: str, unit: str) -> Projection:
    return Projection(name=name, axis=1, units=(unit,))


_OUTPUTS = (_columns("self_attn.o_proj", "query_head"), _columns("mlp.down_proj", "channel"))
_SEPARATE = (
    _rows("self_attn.q_proj", "query_head"),
    _rows("self_attn.k_proj", "kv_head"),
    _rows("self_attn.v_proj", "kv_head"),
    _rows("mlp.gate_proj", "channel"),
    _rows("mlp.up_proj", "channel"),
    *_OUTPUTS,
)
_FUSED = (
    _rows("self_attn.qkv_proj", "query_head", "kv_head", "kv_head"),
    _rows("mlp.gate_up_proj", "channel", "channel"),
    *_OUTPUTS,
)
_NORMS = {"attn": ("input_layernorm",), "mlp": ("post_attention_layernorm",)}
_NORMS_AROUND = {  # Gemma: one before and one after each block
    "attn": ("input_layernorm", "post_attention_layernorm"),
    "mlp": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
QUERY_KEY_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
DENSE = TensorTable(projections=_SEPARATE, norms=_NORMS)
WITH_BIASES = replace(DENSE, biases=_QKV)
WITH_NORMS = replace(DENSE, untouched=QUERY_KEY_NORMS)
TIED = replace(DENSE, is_tied=True)
NORMS_AROUND = TensorTable(projections=_SEPARATE, norms=_NORMS_AROUND, is_tied=True)
FUSED = TensorTable(projections=_FUSED, norms=_NORMS)

TABLES: dict[str, TensorTable] = {  # model_type of the dense config -> table
    "llama": DENSE,
    "mistral": DENSE,
    "qwen2": WITH_BIASES,
    "qwen3": WITH_NORMS,
    "smollm3": TIED,
    "granite": DENSE,
    "gemma2": NORMS_AROUND,
    "gemma3_text": replace(NORMS_AROUND, untouched=QUERY_KEY_NORMS),
    "phi3": FUSED,
    "seed_oss": DENSE,
}
FAMILIES = {  # the same -> the family's name in class names
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "granite": "Granite",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "phi3": "Phi3",
    "seed_oss": "SeedOss",
}


def dense_type(config: Config) -> str:
    """Return the model type of the dense family, from a dense or a pruned config."""
    return str(config.get("model_type")).removeprefix(MODEL_TYPE_PREFIX)
