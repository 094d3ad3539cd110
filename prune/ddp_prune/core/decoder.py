"""Finds the decoder layers of a transformers model, whatever it is called and whatever is built
around it, and sets how a pass computes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ddp_vllm.errors import ModelError

EAGER_TOKENS = 512  # longest sequence for which eager attention is faster than SDPA on a CPU


def decoder_of(model: Any) -> Any:
    """Return the language model without its output head, which returns the last hidden states."""
    decoder = model.get_decoder()
    return model.base_model if decoder is model else decoder  # Llama-4's class returns itself


def decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of the decoder layers of a model, such as `model.layers`.

    These are the one list of modules in its decoder that is as long as its config states.
    Raises: ModelError.
    """
    decoder, number = decoder_of(model), model.config.get_text_config().num_hidden_layers
    children = {id(module) for module in decoder.children() if isinstance(module, nn.ModuleList)}
    modules = [(name, module) for name, module in model.named_modules() if id(module) in children]
    lists = [(name, module) for name, module in modules if len(module) == number]
    if len(lists) != 1:
        names = ", ".join(name for name, _ in lists) or "none"
        raise ModelError(
            f"{type(model).__name__} has no single list of {number} decoder layers (lists of that length: {names})"
        )
    return lists[0]


def auto_class(config: Any) -> Any:
    """Return transformers' class that loads the language model of a config, without the towers
    around it if it can.

    Raises: ModelError.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    raise ModelError(
        f"transformers has no language model for model_type {config.model_type!r}; update transformers, or prune "
        "another model"
    )


def num_chosen_experts(config: Any) -> int:
    """Return to how many routed experts a layer sends each token, from the config of any
    architecture."""
    text = config.get_text_config()
    stated = [getattr(text, key, None) for key in ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")]
    number = next((value for value in stated if value), 1)  # a list has one number per layer
    return int(max(number) if isinstance(number, list | tuple) else number)


def fit_attention(model: Any, seq_len: int, device: torch.device) -> None:
    """Use eager attention for short bfloat16 sequences on a CPU, where SDPA's backward is slow.

    Models whose keys have a bias, such as Qwen2, keep SDPA: their large products lose too much
    precision in bfloat16.
    """
    short = device.type == "cpu" and model.dtype == torch.bfloat16 and seq_len <= EAGER_TOKENS
    biased = any("k_proj" in name and name.endswith("bias") for name, _ in model.named_parameters())
    if short and not biased and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


@contextmanager
def lent(*models: Any) -> Iterator[None]:
    """Give models back as they were: their attention, checkpointed layers and settings of generation,
    which the block may change."""
    before = [(model, model.config._attn_implementation, getattr(model, "generation_config", None)) for model in models]
    modules = [module for model in models for module in model.modules()]
    layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    checkpointed = [(layer, layer.gradient_checkpointing, layer.training) for layer in layers]
    try:
        yield
    finally:
        for model, attention, generation in before:
            if model.config._attn_implementation != attention:
                model.set_attn_implementation(attention)
            model.generation_config = generation
        for layer, is_checkpointed, is_training in checkpointed:
            layer.gradient_checkpointing, layer.training = is_checkpointed, is_training


def checkpoint_layers(model: nn.Module, checkpointed: bool) -> None:
    """Switch checkpointing of the decoder layers on or off.

    transformers checkpoints layers in training mode only. The modules inside stay in eval mode, so
    dropout stays off. Reentrant checkpointing would lose gradients, because the gates are not
    arguments of the layers.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = layer.training = checkpointed
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
