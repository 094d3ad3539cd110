"""Finds the decoder layers of a transformers model, whatever it is called and whatever is built
around it, and sets how a pass computes them: attention, checkpointing, fused kernels."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ddp_vllm.errors import ModelError

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # of MLPs that the product may be fused in
ROTARY = "apply_rotary_pos_emb"  # the function's name in transformers' modeling files
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


def fuse_elementwise(model: nn.Module, backend: str = "inductor") -> int:
    """Compile the elementwise parts of a stock transformers model, its norms, rotary embeddings and
    gated activations, as single kernels; return the number of replaced parts.

    In eager mode each of them is four to ten passes over the activations: 20 to 25 % of a step of a 7B
    model on an H100, by an estimate. Whole layers are not compiled, because gates and narrow widths
    change in every step of the search. Norms and rotary embeddings are compiled from the model's own code. A
    forward of ours replaces that of an MLP only if a trial shows that both compute the same. Used on
    GPUs only; the results equal those of eager mode up to rounding.

    backend: of torch.compile.
    Raises: whatever torch.compile raises without a C compiler; the model is then as it was.
    """
    parts: list[tuple[Any, str, Callable[..., Any]]] = []
    compiled = dict[Any, Callable[..., Any]]()  # one per function: layers share it
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm"):
            forward = compiled.setdefault(kind, torch.compile(kind.forward, dynamic=True, backend=backend))
            parts.append((module, "forward", forward.__get__(module)))
        elif _is_gated_mlp(module):
            product = compiled.setdefault(_product, torch.compile(_product, dynamic=True, backend=backend))
            parts.append((module, "forward", partial(_gated_forward, module, product)))
        elif "Attention" in kind.__name__ and hasattr(file := sys.modules[kind.__module__], ROTARY):
            rotate = getattr(file, ROTARY)
            # not compiled yet
            if file not in compiled and not hasattr(rotate, "_torchdynamo_orig_callable"):
                compiled[file] = torch.compile(rotate, dynamic=True, backend=backend)
                parts.append((file, ROTARY, compiled[file]))
    if parts:  # fails here if the compiler is missing
        device = next(model.parameters()).device
        torch.compile(lambda x: x * torch.sigmoid(x), dynamic=True, backend=backend)(torch.ones(8, device=device))
    for owner, name, replacement in parts:
        setattr(owner, name, replacement)
    return len(parts)


def _product(activation: Any, gate: Tensor, up: Tensor) -> Tensor:
    return torch.as_tensor(activation(gate)) * up


def _gated_forward(mlp: Any, product: Callable[..., Tensor], x: Tensor) -> Tensor:
    hidden: Tensor = mlp.down_proj(product(mlp.act_fn, mlp.gate_proj(x), mlp.up_proj(x)))
    return hidden


@torch.no_grad()
def _is_gated_mlp(module: nn.Module) -> bool:
    """Tell whether a module computes down(act(gate x) · up x) and nothing else.

    With simple functions in the place of its projections, its own forward must return the same
    bits, for numbers of every magnitude: a clamp or threshold shows at its own only.
    """
    projections = {name: partial(torch.roll, shifts=shift, dims=-1) for shift, name in enumerate(PROJECTIONS, 1)}
    if projections.keys() <= module._modules.keys():
        trial: Any = copy.copy(module)
        trial._modules = module._modules | projections
        tensors = next(module.parameters())
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 64)[:, None]
        x = x.to(tensors.device, tensors.dtype)
        with suppress(Exception):  # of a module that takes other arguments, or has other parts
            return torch.equal(trial.forward(x), _gated_forward(trial, _product, x))
    return False
