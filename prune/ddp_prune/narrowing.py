"""Layers that compute only the heads and channels that are still open, while a model learns.

A gate that closed for good gives neither output nor gradient, so its unit need not be computed. The open ones get
weights of their own, used by the student and not by the dense teacher, which is the same model.
Legend: L layers, U units of a layer, N bundles of units that are computed or left out together (a KV head with its
query heads, or a channel), K bundles that are computed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_prune.families import Dimensions, Family
from ddp_prune.processes import USABLE, free_memory

CHANNEL_BLOCK = 64  # widths are multiples: kernels like them, and a CPU compiles one for each width it meets (LOG)


class NarrowLayers:
    """Narrow copies of the projections of a stock dense model."""

    def __init__(self, model: nn.Module, family: Family, sizes: Dimensions) -> None:
        self.family, self.sizes = family, sizes
        self.layers = list(model.get_submodule(family.layers).children())
        self.outputs = {"attn": family.attention_output, "mlp": family.mlp_output}
        kinds = {name: "mlp" if "channel" in parts else "attn" for name, parts in family.rows.items()}
        fused = any(kinds[name] == "attn" and len(parts) > 1 for name, parts in family.rows.items())
        self.inputs = {  # transformers splits fused heads where the config says, whatever the widths
            "attn": () if fused else tuple(name for name, kind in kinds.items() if kind == "attn"),
            "mlp": tuple(name for name, kind in kinds.items() if kind == "mlp"),
        }
        self.kept: dict[str, list[torch.Tensor | None]] = {kind: [None] * sizes.num_layers for kind in self.outputs}
        """Units that are computed, rising, int64; one tensor a layer, None where all are."""
        self._weights: dict[tuple[str, int], dict[tuple[nn.Module, str], nn.Parameter]] = {}

    def fits(self, accelerator: Accelerator, pass_bytes: int) -> bool:
        """Say whether memory holds copies of all these projections beside what a pass takes, none of them cut over
        processes.

        A run that goes on where there is less room computes what is closed too: its sums round differently.
        """
        names = [*self.outputs.values(), *self.family.rows]
        modules = [layer.get_submodule(name) for layer in self.layers for name in names]
        tensors = [tensor for module in modules for tensor in module.parameters()]
        whole = not any(isinstance(tensor, DTensor) for tensor in tensors)
        copies = sum(tensor.nbytes for tensor in tensors)
        return whole and copies + pass_bytes <= USABLE * free_memory(accelerator)

    @torch.no_grad()
    def follow(self, is_open: dict[str, torch.Tensor]) -> None:
        """Compute the open units (bool [L, U] a module type) from now on; what is cut depends on nothing else."""
        for kind in self.outputs:
            num_bundles = {"attn": self.sizes.num_kv_heads, "mlp": self.sizes.intermediate_size}[kind]
            block = {"attn": 1, "mlp": CHANNEL_BLOCK}[kind]
            for layer, open_NU in enumerate(is_open[kind].unflatten(1, (num_bundles, -1))):
                wanted_N = open_NU.any(-1)
                num_kept = max(1, -(-int(wanted_N.sum()) // block)) * block  # closed ones fill up the last block
                kept_K = wanted_N.int().argsort(descending=True, stable=True)[:num_kept].sort().values
                if num_kept >= num_bundles or not self.inputs[kind]:
                    self.kept[kind][layer] = None
                    self._weights.pop((kind, layer), None)
                    continue
                units_NU = torch.arange(open_NU.numel(), device=kept_K.device).view_as(open_NU)
                before, now = self.kept[kind][layer], units_NU[kept_K].flatten()
                if before is None or not torch.equal(before, now):
                    self.kept[kind][layer], self._weights[kind, layer] = now, self._cut(kind, layer, kept_K)

    def _cut(self, kind: str, layer: int, kept_K: torch.Tensor) -> dict[tuple[nn.Module, str], nn.Parameter]:
        sizes, found = self.sizes, {}
        rows_of = {"query": sizes.group_size * sizes.head_dim, "key": sizes.head_dim, "channel": 1}  # of a bundle
        for name in self.inputs[kind]:
            module, parts = self.layers[layer].get_submodule(name), self.family.rows[name]
            for key, tensor in module.named_parameters():
                pieces = zip(tensor.chunk(len(parts)), parts, strict=True)
                kept = [piece.unflatten(0, (-1, rows_of[part]))[kept_K].flatten(0, 1) for piece, part in pieces]
                found[module, key] = torch.cat(kept)
        output: Any = self.layers[layer].get_submodule(self.outputs[kind])  # its bias does not depend on units
        columns = output.weight.unflatten(1, (-1, rows_of["query" if kind == "attn" else "channel"]))
        found[output, "weight"] = columns[:, kept_K].flatten(1)
        return {place: nn.Parameter(tensor, requires_grad=False) for place, tensor in found.items()}

    @contextmanager
    def computed(self) -> Iterator[None]:
        """Put the narrow weights in the place of the model's, inside the block."""
        changes = {place: narrow for cut in self._weights.values() for place, narrow in cut.items()}
        whole = {(module, name): module._parameters[name] for module, name in changes}
        try:
            for (module, name), narrow in changes.items():
                module._parameters[name] = narrow
            yield
        finally:
            for (module, name), parameter in whole.items():
                module._parameters[name] = parameter
