"""Gates, scales and budget of one run, and the one step that moves them.

A gate that closes stays closed, and the scales of the others are learned meanwhile: the search of the default
controller, and after its support is rounded exactly, the polish of every one.
Weights are frozen and get no gradients; the only parameters are z.
Legend: L layers, U units of a layer. Where masks are said to be [L, U],
those of routed experts are [L, E, C]: E experts with C channels each.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ddp_prune.activations import pass_bytes
from ddp_prune.batches import Batches, Teacher
from ddp_prune.budget import highest_worth, keep_schedule, kept_share, share_leftover
from ddp_prune.experts import neutral_where_idle
from ddp_prune.gates import GatedModel, Masks
from ddp_prune.narrowing import NarrowLayers
from ddp_prune.objective import OutputHead, distilled_loss
from ddp_prune.perplexity import final_hidden
from ddp_prune.pools import Pool, make_pools
from ddp_prune.recipe import Recipe
from ddp_vllm.errors import TrainingError

KEPT_FLOOR = 0.05  # lowest scale of a unit that stays; at 0 it would be lost to the budget
PRIOR_PRECISION = 50.0  # of scales before any token is seen: within 0.14 of 1. 10 did worse on other text (LOG)
PRIOR_SHARE = 1 / 20  # of the run's tokens, taken for seen already, with every scale at 1
REVIVED = 0.5  # scale of a unit that comes back because rounding needs it, if the search left it none


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What training hands to export."""

    gates: Masks
    """float32 [L, U] a module type; exactly P positive entries, the rest 0."""
    z: Masks
    """The logits of the gates before rounding and polish."""
    saliency: Masks
    """Float32 as the gates: what closing an open one would cost, or opening a closed one gain (squared gradients)."""
    rounding: dict[str, dict[str, float]]
    """What the rounding changed, a module type: raw sparsity, units revived, units dropped."""
    routed: Masks
    """`experts`: int64 [L, E], how often each expert was chosen while learning; empty for a dense model."""


class Trainer:
    """Gates, scales and budget of one run, and the one step that moves them."""

    def __init__(self, gated: GatedModel, batches: Batches, recipe: Recipe, accelerator: Accelerator) -> None:
        self.gated, self.batches, self.recipe, self.accelerator = gated, batches, recipe, accelerator
        self.teacher = Teacher(gated, batches) if recipe.distillation > 0 else None
        device = accelerator.device
        self.z = nn.ParameterDict({kind: nn.Parameter(torch.ones(shape)) for kind, shape in gated.shapes.items()})
        self.z.to(device)
        self.pools = pools_of(gated, recipe)
        self.costs = {pool.name: self._cost(pool) for pool in self.pools}
        self.information = {kind: torch.zeros_like(z, requires_grad=False) for kind, z in self.z.items()}
        self.num_steps = {kind: torch.zeros_like(z, requires_grad=False) for kind, z in self.z.items()}  # with a say
        self.support = {kind: torch.ones_like(z, dtype=torch.bool) for kind, z in self.z.items()}  # what may stay
        self.routed = {
            kind: torch.zeros_like(z[..., 0], dtype=torch.int64) for kind, z in self.z.items() if z.dim() == 3
        }
        self.searched_z: Masks = {}  # empty while searching
        self.rounding: dict[str, dict[str, float]] = {}
        narrow = NarrowLayers(gated.model, gated.family, gated.sizes) if "mlp" in self.z else None
        needed = pass_bytes(gated, batches.micro, recipe.seq_len)
        self.narrow = narrow if narrow and narrow.fits(accelerator, needed) else None

    @property
    def polishing(self) -> bool:
        """The support is rounded and frozen."""
        return bool(self.searched_z)

    def forward_masks(self) -> Masks:
        """Return m [L, U] of every module type."""
        return {kind: z.clamp_min(KEPT_FLOOR) * self.support[kind] for kind, z in self.z.items()}

    def step(self, step: int) -> dict[str, float]:
        """Do one optimizer step and return its metrics. Raises: TrainingError if the loss is not a number."""
        recipe = self.recipe
        if step >= recipe.search_steps and not self.polishing:
            self.round()
        if self.narrow:
            self.narrow.follow(self.support)
        masks = self.forward_masks()
        cross_entropy, divergence, gradients, squares = self._gradients(step, masks)
        loss = cross_entropy + recipe.distillation * divergence
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} at step {step + 1}")
        for kind, support in self.support.items():  # what is closed may not have been computed
            self.information[kind] += squares[kind] * support
            self.num_steps[kind] += support
        if self.polishing:
            self._learn_scales(gradients)
        else:
            self._search(step, masks, gradients)
        distilled = {"kl": divergence} if self.teacher else {}
        return {"step": step + 1, "loss": loss, "ce": cross_entropy} | distilled | self._measure(step)

    def _search(self, step: int, masks: Masks, gradients: Masks) -> None:
        """Move scales, then close gates; `masks` are those of the step, which gave `gradients`."""
        self._learn_scales(gradients)
        self._close(self._progress(step))

    def _progress(self, step: int) -> float:
        """Return how much of the search is done after this step, in (0, 1]."""
        return min(1.0, (step + 1) / self.recipe.search_steps)

    def _gradients(self, step: int, masks: Masks) -> tuple[float, float, Masks, Masks]:
        """Return CE, KL, dloss/dm [L, U] and the sum over tokens of the square of each one's own, over all processes.

        The squares are the diagonal of the empirical Fisher information with tokens as samples: 256 times as many as
        sequences, and the same however a step is cut into micro-batches. Summed in float64: AdamW makes much of the
        smallest gradients, so an order of sums that depends on the number of processes would show in the gates.
        """
        losses = torch.zeros(2, device=self.accelerator.device)
        gradients = {kind: torch.zeros_like(mask, dtype=torch.float64) for kind, mask in masks.items()}
        squares = {kind: torch.zeros_like(mask, dtype=torch.float64) for kind, mask in masks.items()}
        routed = {kind: torch.zeros_like(counts) for kind, counts in self.routed.items()}
        size, tokens_each = self.recipe.batch_size, self.recipe.seq_len - 1
        for numbers in self.batches.step(step):
            tokens = self.batches.blocks[numbers].to(self.accelerator.device)
            leaves = {kind: mask.detach().requires_grad_() for kind, mask in masks.items()}
            parts = {kind: torch.zeros_like(mask) for kind, mask in leaves.items()}
            losses += self._backward(tokens, numbers, leaves, parts, routed.get("experts")) * (len(numbers) / size)
            for kind, leaf in leaves.items():
                assert leaf.grad is not None
                gradients[kind] += leaf.grad.double() * (len(numbers) / size)
                # the loss is a mean over the micro-batch; a token's own loss has this many times its gradient
                squares[kind] += parts[kind].double() * (len(numbers) * tokens_each) ** 2
        reduce = self.accelerator.reduce
        cross_entropy, divergence = reduce(losses, "sum").tolist()
        for kind, counts in routed.items():
            self.routed[kind] += reduce(counts, "sum")
        total = {kind: reduce(value, "sum").float() for kind, value in gradients.items()}
        return cross_entropy, divergence, total, {kind: reduce(value, "sum").float() for kind, value in squares.items()}

    def _backward(
        self, tokens: torch.Tensor, numbers: list[int], leaves: Masks, squares: Masks, counts: torch.Tensor | None
    ) -> torch.Tensor:
        """Run one micro-batch forward and backward into the leaves; return [CE, KL] in nats a token."""
        model: Any = self.gated.model
        teacher = self.teacher.hidden(tokens, numbers) if self.teacher else None
        with self.gated.masks(leaves, squares, self.narrow):
            with self.gated.counting(counts):  # forward alone: checkpointed layers run again in backward
                student = final_hidden(model, tokens)
            loss, cross_entropy, divergence = distilled_loss(
                student, teacher, OutputHead.of(model), tokens[:, 1:].reshape(-1), self.recipe.distillation
            )
            loss.backward()
        return torch.tensor([cross_entropy, divergence], device=tokens.device)

    @torch.no_grad()
    def _learn_scales(self, gradients: Masks) -> None:
        """Move the scales that stay by a natural gradient step, and leave the others as they are."""
        num_tokens = self.recipe.batch_size * (self.recipe.seq_len - 1)
        for kind, z in self.z.items():
            assumed = PRIOR_SHARE * self.recipe.steps / self.num_steps[kind].clamp_min(1)
            moved = natural_step(z, gradients[kind] * num_tokens, self.information[kind], assumed)
            z.copy_(torch.where(self.support[kind], moved.clamp_min(KEPT_FLOOR), z))

    @torch.no_grad()
    def _close(self, progress: float) -> None:
        """Close the gates that are worth least for their cost until what stays is what the schedule allows now."""
        for pool in self.pools:
            worth = {
                kind: self._worth(kind, self.z[kind]).masked_fill(~self.support[kind], -1.0) for kind in pool.shapes
            }
            keep_ratio = keep_schedule(progress, pool.keep_ratio)
            worth_GN, cost_GN = pool.rows(worth), self.costs[pool.name]
            kept_GN = highest_worth(worth_GN, cost_GN, keep_ratio)
            kept_GN = share_leftover(kept_GN, worth_GN, cost_GN, keep_ratio)
            for kind, kept in pool.unrows(kept_GN).items():
                self.support[kind] &= kept

    def _cost(self, pool: Pool) -> torch.Tensor:
        """Return what the units of a pool cost, [G, N], in float32; scaled, as only ratios matter."""
        cost_GN = pool.rows({kind: pool.unit_costs(kind) for kind in pool.shapes})
        return (cost_GN / cost_GN.max()).float().to(self.accelerator.device)

    def _saliency(self, kind: str) -> torch.Tensor:
        """Return the information on each gate a step, with no verdict on experts that were never chosen."""
        saliency = self.information[kind] / self.num_steps[kind].clamp_min(1)
        return neutral_where_idle(saliency, self.routed[kind]) if kind in self.routed else saliency

    @torch.no_grad()
    def _worth(self, kind: str, gates: torch.Tensor) -> torch.Tensor:
        """Return the saliency of moving each gate between 0 and its scale, 1 where it is closed."""
        return self._saliency(kind) * torch.where(gates > 0, gates.square(), 1.0)

    @torch.no_grad()
    def round(self) -> None:
        """Freeze the support at the budget by highest saliency, open gates before closed ones."""
        alive_of = self._alive()
        worth = {kind: self._worth(kind, z) for kind, z in self.z.items()}
        chosen = {kind: mask for pool in self.pools for kind, mask in pool.choose(worth, alive_of).items()}
        for kind, z in self.z.items():
            alive, support = alive_of[kind], chosen[kind]
            self.searched_z[kind] = z.detach() * alive
            z[support & ~alive & (z <= 0)] = REVIVED
            self.support[kind] = support
            self.rounding[kind] = {
                "raw_sparsity": 1.0 - float(alive.float().mean()),
                "revived": int((support & ~alive).sum()),
                "dropped": int((alive & ~support).sum()),
            }

    def _alive(self) -> Masks:
        """Return the open gates, bool [L, U]."""
        return self.support

    def _measure(self, step: int) -> dict[str, float]:
        """Return what is worth knowing of the gates after a step."""
        alive = {kind: mask.float() for kind, mask in self._alive().items()}
        values = {f"{kind}_sparsity": 1.0 - float(mask.mean()) for kind, mask in alive.items()}
        for pool in self.pools:
            if pool.name not in self.z:
                shares_G = kept_share(pool.rows(alive), self.costs[pool.name])
                values[f"{pool.name}_sparsity"] = 1.0 - float(shares_G.mean())
        return values

    def learned(self) -> Learned:
        """Return the final gates; rounds first if the recipe has no polish."""
        if not self.polishing:
            self.round()
        with torch.no_grad():
            gates = {kind: mask.detach().float().cpu() for kind, mask in self.forward_masks().items()}
        z = {kind: value.float().cpu() for kind, value in self.searched_z.items()}
        routed = {kind: counts.cpu() for kind, counts in self.routed.items()}
        saliency = {kind: self._worth(kind, mask).cpu() for kind, mask in self.forward_masks().items()}
        return Learned(gates=gates, z=z, saliency=saliency, rounding=self.rounding, routed=routed)

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything the next step depends on, as named tensors."""
        named = {f"z.{kind}": z.detach() for kind, z in self.z.items()}
        for group in ("information", "num_steps", "routed", "support", "searched_z"):
            named |= {f"{group}.{kind}": value for kind, value in getattr(self, group).items()}
        return {name: value.cpu() for name, value in named.items()}

    def restore(self, tensors: dict[str, torch.Tensor], rounding: dict[str, dict[str, float]]) -> None:
        """Take back what `state` returned."""
        for name, value in tensors.items():
            group, _, kind = name.partition(".")
            if group == "z":
                self.z[kind].data.copy_(value)
            else:
                getattr(self, group)[kind] = value.to(self.accelerator.device)
        self.rounding = rounding


def pools_of(gated: GatedModel, recipe: Recipe) -> list[Pool]:
    """Return the constraints of a run on a loaded model. Raises: SettingError as `make_pools`."""
    shapes = {name: list(parameter.shape) for name, parameter in gated.model.named_parameters()}
    config: Any = gated.model.config
    return make_pools(config.to_dict(), shapes, gated.sizes, gated.head_unit, recipe)


def natural_step(
    z: torch.Tensor, gradient: torch.Tensor, information: torch.Tensor, assumed: torch.Tensor
) -> torch.Tensor:
    """Return z moved by the gradient of some tokens over the precision with which each scale is known by now.

    A natural gradient step without a rate to choose (arXiv:1703.00209): under a normal prior around its first value, a
    scale's likelihood taken as quadratic, it leads to the mode of its posterior. The precision is that of the prior
    and the Fisher information of the tokens so far; the prior is worth PRIOR_PRECISION and `assumed` times as many
    tokens as were seen. Without these the first steps believe the noise of a few hundred tokens: KL to the dense model
    was 1.0 after two steps that removed nothing. All tensors are of one shape, and sums over tokens, not means.
    """
    return z - gradient / (PRIOR_PRECISION + (1.0 + assumed) * information)
