"""The loop: search the support, round it exactly, polish the scales of what is kept.

Weights are frozen and get no gradients; the only parameters are z (and, for the paper's budget, λ).
Legend: L layers, U units of a layer. Where masks are said to be [L, U],
those of routed experts are [L, E, C]: E experts with C channels each.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ddp_prune.activations import fit_activations
from ddp_prune.batches import Batches, Teacher
from ddp_prune.budget import AugmentedLagrangian, highest_worth, hold_budget, keep_schedule, kept_share
from ddp_prune.experts import neutral_where_idle
from ddp_prune.gates import GatedModel, Masks, gate, retention_score, sharpness_at
from ddp_prune.objective import OutputHead, distilled_loss
from ddp_prune.perplexity import final_hidden
from ddp_prune.pools import Pool, make_pools
from ddp_prune.processes import load_run
from ddp_prune.recipe import Recipe
from ddp_prune.run_state import RunState
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
    """Gates, optimizer and budget of one run, and the one step that moves them."""

    def __init__(self, gated: GatedModel, batches: Batches, recipe: Recipe, accelerator: Accelerator) -> None:
        self.gated, self.batches, self.recipe, self.accelerator = gated, batches, recipe, accelerator
        self.teacher = Teacher(gated, batches) if recipe.distillation > 0 else None
        device = accelerator.device
        self.z = nn.ParameterDict({kind: nn.Parameter(torch.ones(shape)) for kind, shape in gated.shapes.items()})
        self.z.to(device)
        self.pools = pools_of(gated, recipe)
        self.costs = {pool.name: self._cost(pool) for pool in self.pools}
        self.multipliers = AugmentedLagrangian({pool.name: pool.keep_ratio for pool in self.pools}).to(device)
        self.information = {kind: torch.zeros_like(z, requires_grad=False) for kind, z in self.z.items()}
        self.support = {kind: torch.ones_like(z, dtype=torch.bool) for kind, z in self.z.items()}  # what may stay
        self.routed = {
            kind: torch.zeros_like(z[..., 0], dtype=torch.int64) for kind, z in self.z.items() if z.dim() == 3
        }
        self.searched_z: Masks = {}  # empty while searching
        self.rounding: dict[str, dict[str, float]] = {}
        multipliers = self.multipliers
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [*self.z.values()], "base": recipe.learning_rate},
                {
                    "params": [*multipliers.lambda1.values(), *multipliers.lambda3.values()],
                    "base": recipe.lambda_learning_rate,
                    "maximize": True,
                },
                {"params": [*multipliers.lambda2.values()], "base": recipe.lambda2_learning_rate, "maximize": True},
            ],
            betas=(0.9, 0.999),
            weight_decay=0.0,
        )

    @property
    def polishing(self) -> bool:
        """The support is rounded and frozen."""
        return bool(self.searched_z)

    @property
    def annealing(self) -> bool:
        """The search moves z through the surrogate, by AdamW; otherwise gates close for good and scales are learned."""
        return not self.polishing and self.recipe.controller != "gradual"

    def forward_masks(self) -> Masks:
        """Return m [L, U] of every module type, differentiable in z."""
        if self.annealing:
            return {kind: gate(z) for kind, z in self.z.items()}
        return {kind: z.clamp_min(KEPT_FLOOR) * self.support[kind] for kind, z in self.z.items()}

    def score(self, z: torch.Tensor, mu: float) -> torch.Tensor:
        """Return s, what the multipliers count a unit as; shaped as z."""
        return retention_score(z, mu)

    def step(self, step: int) -> dict[str, float]:
        """Do one optimizer step and return its metrics. Raises: TrainingError if the loss is not a number."""
        recipe = self.recipe
        if step >= recipe.search_steps and not self.polishing:
            self.round()
        progress = min(1.0, (step + 1) / recipe.search_steps)
        mu = sharpness_at(progress, recipe.mu_start, recipe.mu_end)
        masks = self.forward_masks()
        cross_entropy, divergence, gradients, squares = self._gradients(step, masks)
        loss = cross_entropy + recipe.distillation * divergence
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} at step {step + 1}")
        self._remember(squares)
        if self.annealing:
            self._descend(step, masks, gradients, mu)
            self._hold(progress, mu)
        else:
            self._learn_scales(step, gradients)
        if not self.polishing and not self.annealing:
            self._close(progress)
        return {"step": step + 1, "loss": loss, "ce": cross_entropy, "kl": divergence} | self._measure(mu)

    def _gradients(self, step: int, masks: Masks) -> tuple[float, float, Masks, Masks]:
        """Return CE, KL, dloss/dm [L, U] and the mean over tokens of its part's square, summed over processes.

        The squares are the diagonal of the empirical Fisher matrix with tokens as samples: 256 times as many as
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
                squares[kind] += parts[kind].double() * ((len(numbers) * tokens_each) ** 2 / (size * tokens_each))
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
        with self.gated.masks(leaves, squares):
            with self.gated.counting(counts):  # forward alone: checkpointed layers run again in backward
                student = final_hidden(model, tokens)
            loss, cross_entropy, divergence = distilled_loss(
                student, teacher, OutputHead.of(model), tokens[:, 1:].reshape(-1), self.recipe.distillation
            )
            loss.backward()
        return torch.tensor([cross_entropy, divergence], device=tokens.device)

    def _remember(self, squares: Masks) -> None:
        """Add a step's squared gradients of single tokens to the diagonal Fisher information of all tokens so far."""
        for kind, square in squares.items():
            self.information[kind].add_(square * self._tokens)

    @property
    def _tokens(self) -> int:
        return self.recipe.batch_size * (self.recipe.seq_len - 1)

    @torch.no_grad()
    def _learn_scales(self, step: int, gradients: Masks) -> None:
        """Move the scales that stay by a natural gradient step, and leave the others as they are."""
        assumed = PRIOR_SHARE * self.recipe.steps / (step + 1)
        for kind, z in self.z.items():
            moved = natural_step(z, gradients[kind] * self._tokens, self.information[kind], assumed)
            z.copy_(torch.where(self.support[kind], moved.clamp_min(KEPT_FLOOR), z))

    def _descend(self, step: int, masks: Masks, gradients: Masks, mu: float) -> None:
        """Give AdamW the gradients of z (and λ) and let it step: the search through the surrogate."""
        self.optimizer.zero_grad()
        for kind, mask in masks.items():
            mask.backward(gradients[kind])
        if self.recipe.controller == "alm":
            scores = {pool.name: self.score(pool.rows(dict(self.z)), mu) for pool in self.pools}
            self.multipliers(scores, self.costs).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.recipe, group["base"])
        self.optimizer.step()

    def _hold(self, progress: float, mu: float) -> None:
        """Keep z within its bounds, and on the budget if that is ours to do."""
        floor = self.recipe.gate_floor
        if self.recipe.controller == "alm":
            for z in self.z.values():
                z.data.clamp_(min=floor)
            return
        for pool in self.pools:
            target = keep_schedule(progress, pool.keep_ratio)
            z_GN = pool.rows({kind: self.z[kind].detach() for kind in pool.shapes})
            curvature_GN = pool.rows({kind: self._saliency(kind) for kind in pool.shapes})
            moved = hold_budget(z_GN, curvature_GN, self.costs[pool.name], mu, target, floor=floor)
            if progress == 1.0:
                cost_GN = self.costs[pool.name]
                moved = hold_budget(moved, curvature_GN, cost_GN, mu, target, floor=floor, count_open=True)
            for kind, values in pool.unrows(moved).items():
                self.z[kind].data.copy_(values)

    @torch.no_grad()
    def _close(self, progress: float) -> None:
        """Close the gates that are worth least for their cost until what stays is what the schedule allows now."""
        for pool in self.pools:
            worth = {
                kind: self._worth(kind, self.z[kind]).masked_fill(~self.support[kind], -1.0) for kind in pool.shapes
            }
            keep_ratio = keep_schedule(progress, pool.keep_ratio)
            kept_GN = highest_worth(pool.rows(worth), self.costs[pool.name], keep_ratio)
            for kind, kept in pool.unrows(kept_GN).items():
                self.support[kind] &= kept

    def _cost(self, pool: Pool) -> torch.Tensor:
        """Return what the units of a pool cost, [G, N], in float32; scaled, as only ratios matter."""
        cost_GN = pool.rows({kind: pool.unit_costs(kind) for kind in pool.shapes})
        return (cost_GN / cost_GN.max()).float().to(self.accelerator.device)

    def _saliency(self, kind: str) -> torch.Tensor:
        """Return the mean square of a token's gradient, with no verdict on experts that were never chosen."""
        saliency = self.information[kind] / self._tokens  # a scale of its own: only ratios matter
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
        return {kind: z > 0 for kind, z in self.z.items()} if self.annealing else self.support

    def _measure(self, mu: float) -> dict[str, float]:
        alive = {kind: mask.float() for kind, mask in self._alive().items()}
        values = {f"{kind}_sparsity": 1.0 - float(mask.mean()) for kind, mask in alive.items()}
        if self.annealing:
            values |= {"mu": mu}
            values |= {f"{kind}_score": float(self.score(z.detach(), mu).mean()) for kind, z in self.z.items()}
        for pool in self.pools:
            if pool.name not in self.z:
                shares_G = kept_share(pool.rows(alive), self.costs[pool.name])
                values[f"{pool.name}_sparsity"] = 1.0 - float(shares_G.mean())
            if self.recipe.controller == "alm":
                for name in ("lambda1", "lambda2", "lambda3"):
                    values[f"{pool.name}_{name}"] = float(getattr(self.multipliers, name)[pool.name].detach())
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
        named |= {f"multipliers.{name}": value for name, value in self.multipliers.state_dict().items()}
        for group in ("information", "routed", "support", "searched_z"):
            named |= {f"{group}.{kind}": value for kind, value in getattr(self, group).items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            named |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
        return {name: value.cpu() for name, value in named.items()}

    def restore(self, tensors: dict[str, torch.Tensor], rounding: dict[str, dict[str, float]]) -> None:
        """Take back what `state` returned."""
        device = self.accelerator.device
        optimizer: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            group, _, rest = name.partition(".")
            if group == "z":
                self.z[rest].data.copy_(value)
            elif group == "multipliers":
                self.multipliers.get_parameter(rest).data.copy_(value)
            elif group == "optimizer":
                index, _, key = rest.partition(".")
                optimizer.setdefault(int(index), {})[key] = value
            else:
                getattr(self, group)[rest] = value.to(device)
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": optimizer})
        self.rounding = rounding


def pools_of(gated: GatedModel, recipe: Recipe) -> list[Pool]:
    """Return the constraints of a run on a loaded model. Raises: SettingError as `make_pools`."""
    shapes = {name: list(parameter.shape) for name, parameter in gated.model.named_parameters()}
    config: Any = gated.model.config
    return make_pools(config.to_dict(), shapes, gated.sizes, gated.head_unit, recipe)


def train(
    gated: GatedModel,
    blocks: torch.Tensor,
    recipe: Recipe,
    accelerator: Accelerator,
    run: RunState,
    report: Callable[[dict[str, float]], None],
) -> Learned:
    """Learn the gates of a frozen model on `blocks` (int64 [num_blocks, seq_len]); goes on from `run` if it can.

    `report` is called after every step with its metrics (losses in nats a token, sparsity a module type, tokens and
    seconds). Raises: TrainingError if the loss is not a number; the last saved masks stay in the run's folder.
    """
    batches = Batches(blocks, recipe, accelerator)
    fit_activations(gated, recipe.activation_checkpointing, batches.micro * recipe.seq_len, accelerator)
    trainer = Trainer(gated, batches, recipe, accelerator)
    first, saved = 0, load_run(run, accelerator)
    if saved is None:
        run.start()
    else:
        first, tensors, rounding = saved
        trainer.restore(tensors, rounding)
    for step in range(first, recipe.steps):
        began = time.perf_counter()
        try:
            metrics = trainer.step(step)
        except TrainingError as error:
            kept = f"the masks of the last save are in {run.folder}" if run.state.exists() else "nothing was saved yet"
            raise TrainingError(f"{error}; {kept}; try a lower learning_rate") from None
        seconds = time.perf_counter() - began
        metrics |= {"seconds": seconds, "tokens": float(recipe.batch_size * recipe.seq_len)}
        run.log(metrics)
        if (step + 1) % recipe.save_every == 0:
            run.save(step + 1, trainer.state(), trainer.rounding)
        accelerator.log(metrics, step=step + 1)
        report(metrics)
    return trainer.learned()


def natural_step(z: torch.Tensor, gradient: torch.Tensor, information: torch.Tensor, assumed: float) -> torch.Tensor:
    """Return z moved by the gradient of some tokens over the precision with which each scale is known by now.

    A natural gradient step without a rate to choose (arXiv:1703.00209): under a normal prior around its first value, a
    scale's likelihood taken as quadratic, it leads to the mode of its posterior. The precision is that of the prior
    and the Fisher information of the tokens so far; the prior is worth PRIOR_PRECISION and `assumed` times as many
    tokens as were seen. Without these the first steps believe the noise of a few hundred tokens: KL to the dense model
    was 1.0 after two steps that removed nothing. All tensors are of one shape, and sums over tokens, not means.
    """
    return z - gradient / (PRIOR_PRECISION + (1.0 + assumed) * information)


def learning_rate(step: int, recipe: Recipe, base: float) -> float:
    """Return AdamW's rate at a step of the search: linear warm-up to `base`, then cosine to 0."""
    warmup = max(1, round(recipe.warmup * recipe.search_steps))
    progress = max(0.0, (step - warmup) / max(1, recipe.search_steps - warmup))
    return base * min(1.0, (step + 1) / warmup) * 0.5 * (1.0 + math.cos(math.pi * progress))
