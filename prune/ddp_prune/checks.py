"""Whether settings suit a model, before torch is imported."""

import math

from ddp_prune.models.source import Source
from ddp_prune.recipe import Recipe
from ddp_vllm.dimensions import MIXTURES
from ddp_vllm.errors import SettingError


def check_suits(recipe: Recipe, source: Source) -> None:
    """Refuse settings that do not suit a model. Raises: SettingError."""
    longest = source.text_config.get("max_position_embeddings") or math.inf
    if recipe.seq_len > longest:
        raise SettingError("seq_len", f"is {recipe.seq_len}, but {recipe.model} takes {longest:,}; lower --seq-len")
    if recipe.scope == "expert" and source.sizes.blocks != ("experts",):
        raise SettingError(
            "scope", f"is 'expert', but {recipe.model} is not a mixture of experts; choose global or layer"
        )
    if recipe.whole_experts and "experts" not in source.sizes.blocks:
        raise SettingError(f"{recipe.model} is not a mixture of experts, so it has no whole experts to remove")
    if recipe.whole_experts and source.config["model_type"] not in MIXTURES:
        raise SettingError(
            "whole_experts",
            f"removes rows of the router, which {source.config['model_type']} does not allow; prune channels: "
            "leave it out",
        )
    if recipe.scope == "layer" and recipe.budget != "units" and {"mlp", "experts"} <= {*source.sizes.blocks}:
        raise SettingError(
            "scope", "is 'layer', but layers have MLPs or experts; give a scope of global, or --prune mlp"
        )
