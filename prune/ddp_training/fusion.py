"""Norms, rotary embeddings and gated activations of a model as single kernels, by torch.compile.

In eager mode each of them is four to ten passes over the activations: 20 to 25 % of a step of a 7B
model on an H100, by an estimate. Whole layers are not compiled, because gates and narrow widths
change in every step of the search. Used on GPUs only; the results equal those of eager mode up to
rounding.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROTARY = "apply_rotary_pos_emb"  # the function's name in transformers' modeling files


def fuse_elementwise(model: nn.Module, backend: str = "inductor") -> int:
    """Compile the elementwise parts of a stock transformers model; return the number of replaced
    parts.

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
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            key = type(module.act_fn)
            product = compiled.setdefault(key, torch.compile(_product_of(module.act_fn), dynamic=True, backend=backend))
            parts.append((module, "forward", _gated_forward(module, product)))
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


def _product_of(activation: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(activation(gate)) * up

    return product


def _gated_forward(
    mlp: Any, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = mlp.down_proj(product(mlp.gate_proj(x), mlp.up_proj(x)))
        return hidden

    return forward
