"""Defines which tensors pruning changes, per family: the table used to check, cut, pad and price
weights.

A projection has units along one axis of its weight: its rows compute them (axis 0) or its columns
read them (axis 1). A unit is a query head, a KV head, an MLP channel, or a channel of a routed
expert. When all units of a block are removed, its norms are removed too.

This file is part of every checkpoint and imports only the standard library.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

LAYERS = "model.layers"
"""Module with the decoder layers of every family, on disk and in transformers."""
MODEL_TYPE_PREFIX = "ddp_"
BLOCK_OF = {"query_head": "attn", "kv_head": "attn", "channel": "mlp", "expert_channel": "experts"}
"""Unit -> its block, which is also the module type of its masks."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(\w+)")


# unchanged module -> its shape, in names of `widths.lengths_of`
SHAPES: dict[str, tuple[str, ...]] = {
    "self_attn.q_proj": ("queries", "hidden"),
    **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), ("keys", "hidden")),
    "self_attn.o_proj": ("hidden", "values"),
    **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), ("head",)),
    "self_attn.q_a_proj": ("query_rank", "hidden"),  # latent attention
    "self_attn.q_a_layernorm": ("query_rank",),
    "self_attn.q_b_proj": ("latent_queries", "query_rank"),
    "self_attn.kv_a_proj_with_mqa": ("latent_and_rotated", "hidden"),
    "self_attn.kv_a_layernorm": ("latent",),
    "self_attn.kv_b_proj": ("keys_and_values", "latent"),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ("channels", "hidden")),
    "mlp.down_proj": ("hidden", "channels"),
    **{f"mlp.{shared}.{name}_proj": ("shared", "hidden") for shared in ("shared_expert", "shared_experts")
       for name in ("gate", "up")},
    **dict.fromkeys(("mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj"), ("hidden", "shared")),
    "mlp.shared_expert_gate": ("one", "hidden"),
    **dict.fromkeys(("mlp.gate", "block_sparse_moe.gate"), ("experts", "hidden")),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), ("hidden",)),
    **dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), ("hidden",)),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One linear layer whose weight `[out, in]` has units along `axis`."""

    name: str
    """Module on disk, relative to its decoder layer; `{}` stands for the id of an expert."""
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
    untouched_mlp: tuple[str, ...] = ()
    """Further unchanged modules of layers without routed experts, in a mixture of experts."""
    router: tuple[str, ...] = ()
    """Further unchanged modules of layers with routed experts."""
    optional: tuple[str, ...] = ()
    """Modules that only some models of the family have, depending on the config."""
    biases: tuple[str, ...] = ()
    """Projections that always have a bias."""
    shapes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SHAPES)
    """As in `SHAPES`."""
    is_tied: bool = False
    """Whether the output head is the embedding if the config does not state it."""

    def output(self, block: str) -> Projection:
        """Return the projection with which a block writes to the residual stream; gates scale its
        input."""
        return next(each for each in self.projections if each.block == block and each.axis == 1)

    def inputs(self, block: str) -> tuple[Projection, ...]:
        """Return the projections that compute a block's units."""
        return tuple(each for each in self.projections if each.block == block and each.axis == 0)

    def find(self, module: str) -> tuple[Projection, int] | None:
        """Return the projection named `module`, relative to its layer, and the expert's id (0
        without one)."""
        expert = _EXPERT.fullmatch(module)
        name, number = (f"{expert[1]}.{{}}.{expert[3]}", int(expert[2])) if expert else (module, 0)
        return next(((each, number) for each in self.projections if each.name == name), None)

    def knows(self, module: str) -> bool:
        """Return whether a layer may have a module of that name, relative to it."""
        norms = (norm for names in self.norms.values() for norm in names)
        others = (*self.untouched, *self.untouched_mlp, *self.router, *self.optional, *norms)
        return module in others or self.find(module) is not None

    @property
    def has_experts(self) -> bool:
        """Whether the family is a mixture of experts, of which only routed experts are pruned."""
        return any(each.block == "experts" for each in self.projections)


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
_BEFORE_BLOCKS = ("input_layernorm", "post_attention_layernorm")
_NORMS = {"attn": _BEFORE_BLOCKS[:1], "mlp": _BEFORE_BLOCKS[1:]}
_NORMS_AROUND = {  # Gemma: one before and one after each block
    "attn": ("input_layernorm", "post_attention_layernorm"),
    "mlp": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


def _experts(module: str, gate: str, up: str, down: str) -> TensorTable:
    gate, up, down = (f"{module}.{{}}.{name}" for name in (gate, up, down))
    unit, names = "expert_channel", [each.name for each in _SEPARATE]
    return TensorTable(
        projections=(_rows(gate, unit), _rows(up, unit), _columns(down, unit)),
        untouched=(*(name for name in names if name.startswith("self_attn.")), *_BEFORE_BLOCKS),
        untouched_mlp=tuple(name for name in names if name.startswith("mlp.")),
        router=(f"{module.removesuffix('.experts')}.gate",),
    )


_QUERY_KEY_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_SHARED = tuple(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down"))
DENSE = TensorTable(projections=_SEPARATE, norms=_NORMS)
WITH_BIASES = replace(DENSE, biases=_QKV)
WITH_NORMS = replace(DENSE, untouched=_QUERY_KEY_NORMS)
TIED = replace(DENSE, is_tied=True)
NORMS_AROUND = TensorTable(projections=_SEPARATE, norms=_NORMS_AROUND, is_tied=True)
FUSED = TensorTable(projections=_FUSED, norms=_NORMS)
EXPERTS = _experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
# DeepSeek-V2's attention
_LATENT = ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj")
LATENT = replace(
    EXPERTS,
    untouched=(*_LATENT, "self_attn.kv_a_layernorm", *_BEFORE_BLOCKS),
    optional=(*_SHARED, *(f"self_attn.{name}" for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj"))),
)
SHARED = replace(EXPERTS, optional=_SHARED)
SHARED_GATED = replace(
    EXPERTS,
    router=(*EXPERTS.router, "mlp.shared_expert_gate", *(name.replace("experts", "expert") for name in _SHARED)),
    biases=_QKV,
)
EXPERTS_WITH_NORMS = replace(EXPERTS, untouched=(*EXPERTS.untouched, *_QUERY_KEY_NORMS))
MIXTRAL = _experts("block_sparse_moe.experts", "w1", "w3", "w2")

TABLES: dict[str, TensorTable] = {  # model_type of the dense config -> table
    "llama": DENSE,
    "mistral": DENSE,
    "qwen2": WITH_BIASES,
    "qwen3": WITH_NORMS,
    "smollm3": TIED,
    "granite": DENSE,
    "gemma2": NORMS_AROUND,
    "gemma3_text": replace(NORMS_AROUND, untouched=_QUERY_KEY_NORMS),
    "phi3": FUSED,
    "qwen3_moe": EXPERTS_WITH_NORMS,
    "qwen2_moe": SHARED_GATED,
    "mixtral": MIXTRAL,
    "olmoe": replace(  # one norm over all heads
        EXPERTS_WITH_NORMS, shapes=SHAPES | {"self_attn.q_norm": ("queries",), "self_attn.k_norm": ("keys",)}
    ),
    "deepseek": SHARED,
    "deepseek_v2": LATENT,
}


def dense_type(config: Mapping[str, Any]) -> str:
    """Return the model type of the dense family, from a dense or a pruned config."""
    return str(config.get("model_type")).removeprefix(MODEL_TYPE_PREFIX)


def expert_names(table: TensorTable) -> tuple[str, str, str]:
    """Return the last parts of the names on disk of an expert's gate, up and down projection."""
    gate, up, down = (each.name.rpartition(".")[2] for each in table.projections)
    return gate, up, down


def layer_modules(table: TensorTable, blocks: Mapping[str, int], *, routed: bool) -> Iterator[str]:
    """Yield the modules that a layer must have, relative to it, except those of routed experts.

    blocks: number of kept units of each block. routed: whether the layer has routed experts.
    """
    yield from table.untouched
    yield from table.router if routed else table.untouched_mlp
    for projection in table.projections:
        if projection.block != "experts" and blocks[projection.block]:
            yield projection.name
    for block, norms in table.norms.items():
        yield from norms if blocks[block] else ()
