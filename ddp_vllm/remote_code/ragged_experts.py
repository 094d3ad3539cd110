"""Routed experts of different widths in transformers, for any family.

This file is part of every checkpoint of a mixture of experts.
Legend of shape suffixes: T tokens, H hidden size, K experts per token, S = T·K routed pairs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class RaggedExperts(nn.Module):
    """Routed experts of different widths: one module per expert, named by its id. A removed expert
    has none."""

    def __init__(
        self, stock: Any, sizes: Sequence[int], inputs: Sequence[str], output: str, rows_per_channel: int = 1
    ) -> None:
        """Make modules for the tensors on disk.

        stock: the experts of the dense model. sizes: the channels of each expert. inputs, output:
        the names of an expert's projections. rows_per_channel: 2 if one input holds gate and up.
        """
        super().__init__()
        # the activation of some families has settings of its own
        self.__dict__.update({name: value for name, value in vars(stock).items() if not name.startswith("_")})
        self.act_fn, self.apply_gate = getattr(stock, "act_fn", None), getattr(type(stock), "_apply_gate", _gated)
        self.num_experts, self.kept = len(sizes), [expert for expert, size in enumerate(sizes) if size]
        self.inputs, self.output = tuple(inputs), output
        down = stock.down_proj
        hidden_size = down.shape[-1 if getattr(stock, "is_transposed", False) else 1]
        where = {"device": down.device, "dtype": down.dtype, "bias": getattr(stock, "has_bias", False)}
        for expert in self.kept:
            rows = sizes[expert] * rows_per_channel
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
