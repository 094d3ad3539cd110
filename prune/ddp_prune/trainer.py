"""Gates, scales and budget of one run, and the one step that moves them.

A gate that closes stays closed, and the scales of the others are learned meanwhile: the search of the default
controller, and after its support is rounded exactly, the polish of every one. Weights are frozen and get no gradients,
unless they are told to learn too (`learn_weights`); else the only parameters are z.
Legend: L layers, U units of a layer. Where masks are said to be [L, U],
those of routed experts are [L, E, C]: E experts with C channels each.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from ddp_prune.batches import Batches, Teacher
from ddp_prune.budget import Pool, keep_schedule, kept_share
from ddp_prune.experts import neutral_where_idle
from ddp_prune.gates import GatedModel, Masks
from ddp_prune.loss import OutputHead, distilled_loss, final_hidden
from ddp_prune.memory import narrow_layers
from ddp_prune.recipe import Recipe
from ddp_prune.weights import WARMUP, LearningWeights, highest_rate, rate_of
from ddp_vllm.errors import TrainingError

KEPT_FLOOR = 0.05  # lowest scale of a unit that stays; at 0 it would be lost to the budget
PRIOR_PRECISION = 50.0  # of scales before any token is seen: within 0.14 of 1. 10 did worse on other text (log 36)
PRIOR_SHARE = 1 / 20  # of the run's tokens, taken for seen already, with every scale at 1
PASSED = "after_"  # and the number of a step: gates that are kept of it
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
    passed: dict[str, Masks]
    """The gates after some steps, as `after_100`; as many as the recipe asks for."""
    rounding: dict[str, dict[str, float]]
    """What the rounding changed, a module type: raw sparsity, units revived, units dropped."""
    routed: Masks
    """`experts`: int64 [L, E], how often each expert was chosen while learning; empty for a dense model."""


class Trainer:
    """The default search, and the polish of every search."""

    def __init__(
        self,
        gated: GatedModel,
        batches: Batches,
        recipe: Recipe,
        pools: Sequence[Pool],
        accelerator: Accelerator,
        start: Mapping[str, float] | None = None,
    ) -> None:
        """start: the keep ratio at which the search begins, per pool; None: 1, all gates are open."""
        self.gated, self.batches, self.recipe, self.accelerator = gated, batches, recipe, accelerator
        self.pools, self.start = pools, start or {pool.name: 1.0 for pool in pools}
        self.teacher = Teacher(gated.model, batches) if recipe.distillation > 0 else None
        self.narrow = narrow_layers(gated, accelerator, batches.micro, recipe.seq_len)
        device = accelerator.device
        self.z = {kind: torch.ones(shape, device=device) for kind, shape in gated.shapes.items()}
        self.information = {kind: torch.zeros_like(z) for kind, z in self.z.items()}
        self.num_steps = {kind: torch.zeros_like(z) for kind, z in self.z.items()}  # in which a gate had a say
        self.support = {kind: torch.ones_like(z, dtype=torch.bool) for kind, z in self.z.items()}  # what may stay
        self.routed = {
            kind: torch.zeros_like(z[..., 0], dtype=torch.int64) for kind, z in self.z.items() if z.dim() == 3
        }
        self.weights: LearningWeights | None = None  # that learn beside the gates
        self.searched_z: Masks = {}  # empty while searching
        self.rounding: dict[str, dict[str, float]] = {}
        self.passed: dict[str, Masks] = {}

    def learn_weights(self, weights: LearningWeights, dense: Any) -> None:
        """Let the weights of the gated model learn too; `dense` is another copy of it, which stays the teacher."""
        self.weights = weights
        self.teacher = Teacher(dense, self.batches) if self.recipe.distillation > 0 else None

    @property
    def polishing(self) -> bool:
        """The support is rounded and frozen."""
        return bool(self.searched_z)

    def forward_masks(self) -> Masks:
        """Return m [L, U] of every module type."""
        return {kind: z.clamp_min(KEPT_FLOOR) * self.support[kind] for kind, z in self.z.items()}

    def alive(self) -> Masks:
        """Return the open gates, bool [L, U]."""
        return self.support

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
            self.learn_scales(gradients)
        else:
            self.search(step, masks, gradients)
        if self.weights:
            flat = recipe.search_steps if recipe.in_family else 0  # the rate of a size does not hang on later ones
            rate = rate_of(step, recipe.steps, highest_rate("full", self.gated.sizes.hidden_size), WARMUP, flat)
            self.weights.move(rate, self.weights.join())
        if recipe.masks_every and (step + 1) % recipe.masks_every == 0:
            self.passed[f"{PASSED}{step + 1}"] = {k: m.detach().float().cpu() for k, m in self.forward_masks().items()}
        distilled = {"kl": divergence} if self.teacher else {}
        return {"step": step + 1, "loss": loss, "ce": cross_entropy} | distilled | self.measure(step)

    def search(self, step: int, masks: Masks, gradients: Masks) -> None:
        """Move scales, then close gates; `masks` are those of the step, which gave `gradients`."""
        self.learn_scales(gradients)
        self.close(self.progress(step))

    def progress(self, step: int) -> float:
        """Return how much of the search is done after this step, in (0, 1]."""
        first = self.recipe.after_steps
        return min(1.0, (step + 1 - first) / (self.recipe.search_steps - first))

    def _gradients(self, step: int, masks: Masks) -> tuple[float, float, Masks, Masks]:
        """Return CE, KL, dloss/dm [L, U] and the sum over tokens of the square of each one's own, over all processes.

        The squares are those of single tokens: many times as many samples as sequences, and the same however a step is
        cut into micro-batches. Summed in float64: AdamW makes much of the smallest gradients, so an order of sums that
        depends on the number of processes would show in the gates.
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
            loss_mask_N = self.batches.loss_mask_of(step, numbers)
            found = self._backward(tokens, numbers, loss_mask_N, leaves, parts, routed.get("experts"))
            losses += found * (len(numbers) / size)
            if self.weights:
                self.weights.collect(len(numbers) / size)
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
        self,
        tokens: torch.Tensor,
        numbers: list[int],
        loss_mask_N: torch.Tensor | None,
        leaves: Masks,
        squares: Masks,
        counts: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run one micro-batch forward and backward into the leaves; return [CE, KL] in nats a token."""
        model: Any = self.gated.model
        teacher = self.teacher.hidden(tokens, numbers) if self.teacher else None
        with self.gated.masks(leaves, squares, self.narrow):
            with self.gated.counting(counts):  # forward alone: checkpointed layers run again in backward
                student = final_hidden(model, tokens)
            head, labels_N = OutputHead.of(model), tokens[:, 1:].reshape(-1)
            loss, cross_entropy, divergence = distilled_loss(
                student, teacher, head, labels_N, self.recipe.distillation, loss_mask_N=loss_mask_N
            )
            loss.backward()
        return torch.tensor([cross_entropy, divergence], device=tokens.device)

    @torch.no_grad()
    def learn_scales(self, gradients: Masks) -> None:
        """Move the scales that stay by a natural gradient step, and leave the others as they are."""
        num_tokens = self.recipe.batch_size * (self.recipe.seq_len - 1)
        for kind, z in self.z.items():
            assumed = PRIOR_SHARE * self.recipe.steps / self.num_steps[kind].clamp_min(1)
            moved = natural_step(z, gradients[kind] * num_tokens, self.information[kind], assumed)
            z.copy_(torch.where(self.support[kind], moved.clamp_min(KEPT_FLOOR), z))

    @torch.no_grad()
    def close(self, progress: float) -> None:
        """Close the gates that are worth least for their cost until what stays is what the schedule allows now."""
        for pool in self.pools:
            worth = {kind: self._worth(kind, self.z[kind]) for kind in pool.shapes}
            start = self.start[pool.name]
            self.support.update(pool.close(worth, self.support, keep_schedule(progress, pool.keep_ratio, start)))

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
        alive_of = self.alive()
        worth = {kind: self._worth(kind, z) for kind, z in self.z.items()}
        chosen = self.choose(worth, alive_of)
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

    def choose(self, worth: Masks, alive: Masks) -> Masks:
        """Return what stays for good, bool [L, U]: all that the budget allows, open gates before closed ones."""
        return {kind: mask for pool in self.pools for kind, mask in pool.choose(worth, alive).items()}

    def measure(self, step: int) -> dict[str, float]:
        """Return what is worth knowing of the gates after a step."""
        alive = {kind: mask.float() for kind, mask in self.alive().items()}
        values = {f"{kind}_sparsity": 1.0 - float(mask.mean()) for kind, mask in alive.items()}
        for pool in self.pools:
            if pool.name not in self.z:
                open_GN = pool.join(alive)
                values[f"{pool.name}_sparsity"] = 1.0 - float(
                    kept_share(open_GN, pool.joined_costs(open_GN.device)).mean()
                )
        return values

    @property
    def extra(self) -> dict[str, Any]:
        """What a saved run needs beside tensors: what the rounding changed."""
        return self.rounding

    def learned(self) -> Learned:
        """Return the final gates; rounds first if the recipe has no polish."""
        if not self.polishing:
            self.round()
        masks = {kind: mask.detach() for kind, mask in self.forward_masks().items()}
        return Learned(
            gates={kind: mask.float().cpu() for kind, mask in masks.items()},
            z={kind: value.float().cpu() for kind, value in self.searched_z.items()},
            saliency={kind: self._worth(kind, mask).cpu() for kind, mask in masks.items()},
            passed=self.passed,
            rounding=self.rounding,
            routed={kind: counts.cpu() for kind, counts in self.routed.items()},
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything the next step depends on, as named tensors."""
        parts = self._state_parts().items()
        gates = {f"{part}.{kind}": value.detach().cpu() for part, masks in parts for kind, value in masks.items()}
        return gates | (self.weights.state() if self.weights else {})

    def restore(self, step: int, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
        """Take back what `state` and `extra` were."""
        parts = self._state_parts()
        if self.weights:
            self.weights.restore(step, tensors)
        for name, value in tensors.items():
            part, _, kind = name.partition(".")
            if part.startswith(PASSED):
                self.passed.setdefault(part, {})[kind] = value
                continue
            if part not in parts:
                continue  # a weight's
            if kind in parts[part]:
                parts[part][kind].data.copy_(value)
            else:  # z after the search, of which there is none before it has ended
                parts[part][kind] = value.to(self.accelerator.device)
        self.rounding = extra

    def _state_parts(self) -> dict[str, Masks]:
        return {
            "z": self.z,
            "information": self.information,
            "num_steps": self.num_steps,
            "support": self.support,
            "routed": self.routed,
            "searched_z": self.searched_z,
            **self.passed,
        }


def natural_step(
    z: torch.Tensor, gradient: torch.Tensor, information: torch.Tensor, assumed: torch.Tensor
) -> torch.Tensor:
    """Return z moved by the gradient of some tokens over the squared gradients of all tokens so far.

    In the form of a natural gradient step without a rate to choose (arXiv:1703.00209), with the empirical Fisher
    information in place of the true one: the squares are of the gradient of CE + η·KL, on SmolLM2 1.6 to 2.8 times
    below (1 + η) times the Fisher information. So η lengthens the steps, and they end at no posterior mode. Made
    larger to match, they did 0.2 to 1.7 % worse on a toy (8 of 8 runs), so they stay as they are.

    PRIOR_PRECISION keeps z near its first value, and `assumed` counts as so many times more tokens than were seen.
    Without these the first steps believe the noise of a few hundred tokens (log 36). Tensors are of one shape, and sums
    over tokens, not means.
    """
    return z - gradient / (PRIOR_PRECISION + (1.0 + assumed) * information)
