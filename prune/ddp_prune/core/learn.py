"""Learns the gates of a model in memory, and its weights too: a loaded model, blocks of tokens and
budgets in; gates out.

`Trainer.step` is the algorithm: masks, forward, backward, natural step, closing of gates, weights.
In the default search, a closed gate never reopens, and the scales of the open gates are trained.
`round` then chooses the final support, and the last steps polish its scales. Files, commands, pages
and memory are no concern of this room.
Legend: B sequences of a micro-batch, H hidden size, L layers, U units of a layer. Where this file
writes [L, U], the masks of routed experts are [L, E, C]: E experts with C channels each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from ddp_prune.core.batches import Batches, MicroBatch
from ddp_prune.core.budget import LatencyPool, Pool, keep_schedule
from ddp_prune.core.decoder import lent
from ddp_prune.core.experts import neutral_where_idle
from ddp_prune.core.gates import GatedModel, Masks, narrow_layers
from ddp_prune.core.loop import Learner, Report, Training, take_steps
from ddp_prune.core.processes import broadcast_from_main, raise_on_all_ranks
from ddp_prune.core.schedule import Schedule, Unsaved

KEPT_FLOOR = 0.05  # lowest scale of a kept unit; at 0 it would use up budget without effect
# of the scales, before any token is seen: within 0.14 of 1; with 10, other text had a higher loss
PRIOR_PRECISION = 50.0
PRIOR_SHARE = 1 / 20  # of the run's tokens, treated as already seen with every scale at 1
# steps from one slow selection to the next; the schedule is smooth, so a few more gates close at a time
CLOSE_EVERY = 4
# tokens that a search reads before it closes gates, at most a third of its steps: chosen after 1,024 tokens, the units
# of SmolLM2 raise the loss twice as much as after 6,144, and more than these change little
SEEN_FIRST = 8192
REVIVED = 0.5  # scale of a unit that rounding adds back, if the search left it without one


class Sums(NamedTuple):
    """What the passes of a step add up, shaped as the masks unless stated otherwise."""

    gradients: Masks
    """float64, of the mean loss of the step."""
    squares: Masks
    """float64, of the gradients of single tokens."""
    routed: Masks
    """int64 [L, E], as `GateState.routed`."""

    @classmethod
    def zeros(cls, masks: Masks, routed: Masks) -> "Sums":
        return cls(zeros_like(masks, torch.float64), zeros_like(masks, torch.float64), zeros_like(routed))


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The result of training, from which the checkpoint is exported."""

    gates: Masks
    """float32 [L, U] per module type; exactly P positive entries, the rest 0."""
    z: Masks
    """The logits of the gates before rounding and polish."""
    saliency: Masks
    """float32, shaped as the gates: estimated loss added by closing an open gate, or saved by
    opening a closed one."""
    rounding: dict[str, dict[str, float]]
    """Changes by rounding, per module type: sparsity before it, units revived, units dropped."""
    rate: dict[str, Any]
    """AdamW's `highest` rate of trained weights, and the `trials` that found it; empty if only
    masks were trained."""
    routed: Masks
    """`experts`: int64 [L, E], how often each expert was chosen in training; empty for a dense
    model."""

    def scores(self) -> Masks:
        """Return z and saliency by names such as `mlp.z`."""
        named = {"z": self.z, "saliency": self.saliency}
        return {f"{kind}.{name}": values for name, masks in named.items() for kind, values in masks.items()}

    def routing(self, routed_layers: tuple[int, ...]) -> dict[str, Any]:
        """Return `routed` as plain data, layer number -> counts; {} for a dense model."""
        counts = {kind: values.tolist() for kind, values in self.routed.items()}
        return {"routing": {"chosen": dict(zip(routed_layers, counts["experts"], strict=True))}} if counts else {}


class GateState:
    """Everything a trainer keeps per gate: one tensor per module type, shaped as the masks unless
    stated otherwise."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        """Open every gate, with scale 1."""
        self.z: Masks = {kind: torch.ones(shape, device=device) for kind, shape in shapes.items()}
        """Logits of the gates, which are also their scales."""
        self.information = zeros_like(self.z)
        """Squared gradients summed over all tokens: the diagonal empirical Fisher information."""
        self.open_steps = zeros_like(self.z)
        """Optimizer steps in which the gate was open."""
        self.support: Masks = {kind: z > 0 for kind, z in self.z.items()}
        """Bool: gates that may be open."""
        self.routed = zeros_like({kind: z[..., 0] for kind, z in self.z.items() if z.dim() == 3}, torch.int64)
        """Int64 [L, E]: how often each expert was chosen; without an entry for a dense model."""
        self.searched_z: Masks = {}
        """z when the support was rounded; without entries while searching."""

    def save(self) -> dict[str, Tensor]:
        """Return all tensors by names such as `z.mlp`."""
        return {
            f"{part}.{kind}": tensor.detach() for part, masks in vars(self).items() for kind, tensor in masks.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `save` returned, in place; ignore other tensors."""
        for name, value in tensors.items():
            part, _, kind = name.partition(".")
            if part in vars(self):
                vars(self)[part].setdefault(kind, torch.empty_like(self.z[kind])).data.copy_(value)


def zeros_like(masks: Masks, dtype: torch.dtype | None = None) -> Masks:
    """Return zeros shaped as the masks, by default of their dtype."""
    return {kind: torch.zeros_like(mask, dtype=dtype) for kind, mask in masks.items()}


class Trainer(Learner):
    """The default search, and the polish of every search.

    The scales z are the only parameters, and weights are frozen, unless `training` is given.
    """

    def __init__(
        self,
        gated: GatedModel,
        batches: Batches,
        schedule: Schedule,
        pools: Sequence[Pool],
        training: Training | None = None,
    ) -> None:
        super().__init__(gated.model, batches, schedule, training)
        self.gated, self.pools = gated, pools
        self.narrow = narrow_layers(gated) if schedule.leaves_out else None
        self.gates = GateState(gated.shapes, self.accelerator.device)
        self.sums = Sums.zeros(self.gates.z, self.gates.routed)
        self.rounding: dict[str, dict[str, float]] = {}
        self.prepare()

    def prepare(self) -> None:
        """Create the state that a search keeps in addition to the gates; the default search keeps
        none."""

    @property
    def polishing(self) -> bool:
        """Whether the support is already rounded and frozen."""
        return bool(self.gates.searched_z)

    def forward_masks(self) -> Masks:
        """Return m [L, U] of every module type."""
        return {kind: z.clamp_min(KEPT_FLOOR) * self.gates.support[kind] for kind, z in self.gates.z.items()}

    def open_gates(self) -> Masks:
        """Return which gates are open, bool [L, U]."""
        return self.gates.support

    def step(self, step: int) -> dict[str, float]:
        """Do one optimizer step and return its metrics.

        Gradients are squared per token, not per sequence: these are many more samples, and they do
        not depend on micro-batches. Sums are in float64, because the order of summation depends on
        the number of processes and AdamW amplifies rounding errors of the smallest gradients.

        With a loss mask the loss is a mean over n of N tokens, so a token's own gradient is n times
        that of the loss: text outside the mask changes neither the information nor the steps of the
        scales. The KL term is a mean over all N, so its share of the squares counts n / N of its
        tokens; it is small next to the cross-entropy's.

        Raises: TrainingError if the loss is not a number.
        """
        gates, reduce = self.gates, self.accelerator.reduce
        # before the masks are made: rounding freezes the support, and closed units are not computed
        if step >= self.schedule.steps.search and not self.polishing:
            self.round()
        if self.narrow:
            self.narrow.follow(gates.support)
        masks, loss_share = self.forward_masks(), self.batches.loss_share(step)
        sums = self.sums = Sums.zeros(masks, gates.routed)
        values = self.metrics_of(step, self.backward(step, partial(self._passing, masks, loss_share)))
        for kind, counts in sums.routed.items():
            gates.routed[kind] += reduce(counts, "sum")
        gradients = {kind: reduce(value, "sum").float() for kind, value in sums.gradients.items()}
        for kind, support in gates.support.items():  # closed gates may not have been computed
            gates.information[kind] += reduce(sums.squares[kind], "sum").float() * support
            gates.open_steps[kind] += support
        # natural step and closing of gates; then the weights
        if self.polishing:
            self.learn_scales(step, gradients)
        else:
            self.search(step, masks, gradients)
        if self.weights:
            self.step_weights(step)
        return values | self.measure(step)

    @contextmanager
    def _passing(self, masks: Masks, loss_share: float, batch: MicroBatch) -> Iterator[None]:
        """Apply the masks to a forward and backward pass, and add up what backward yields for them."""
        leaves = {kind: mask.detach().requires_grad_() for kind, mask in masks.items()}
        parts = zeros_like(masks)
        with self.gated.masks(leaves, parts, self.narrow):
            yield
        for kind, leaf in leaves.items():
            assert leaf.grad is not None
            self.sums.gradients[kind].add_(leaf.grad.double() * batch.share)
            self.sums.squares[kind].add_(parts[kind].double() * (len(batch.labels_N) * loss_share) ** 2)

    def hidden(self, batch: MicroBatch) -> Tensor:
        # forward alone is counted: checkpointed layers run again in backward
        with self.gated.counting(self.sums.routed.get("experts")):
            return super().hidden(batch)

    def remedy(self, step: int) -> str:
        return "check the weights" if self.model.dtype == torch.float32 else 'try a recipe with dtype = "float32"'

    def search(self, step: int, masks: Masks, gradients: Masks) -> None:
        """Move the scales, then close gates. masks: of this step. gradients: of the loss, for these
        masks."""
        self.learn_scales(step, gradients)
        self.close(step)

    @torch.no_grad()
    def learn_scales(self, step: int, gradients: Masks) -> None:
        """Move the scales of the support by a natural gradient step; closed gates do not change."""
        num_tokens = self.schedule.batch_size * (self.batches.seq_len - 1) * self.batches.loss_share(step)
        gates = self.gates
        for kind, z in gates.z.items():
            assumed = PRIOR_SHARE * self.schedule.steps.last / gates.open_steps[kind].clamp_min(1)
            moved = natural_step(z, gradients[kind] * num_tokens, gates.information[kind], assumed)
            z.copy_(torch.where(gates.support[kind], moved.clamp_min(KEPT_FLOOR), z))

    @torch.no_grad()
    def close(self, step: int) -> None:
        """Close the gates of least saliency per cost, as many as the schedule requires, and none
        before the text has shown which ones these are.

        With measured costs the selection runs on the CPU, 5 to 10 % of a step on a GPU by an
        estimate, so there gates close in each CLOSE_EVERY-th step only.
        """
        is_slow = self.accelerator.device.type == "cuda" and any(isinstance(pool, LatencyPool) for pool in self.pools)
        first, end, _ = self.schedule.steps
        first = max(first, min(SEEN_FIRST // (self.schedule.batch_size * self.batches.seq_len), end // 3))
        progress = (step + 1 - first) / (end - first)
        if progress <= 0 or (is_slow and (step + 1) % CLOSE_EVERY and step + 1 != self.schedule.steps.search):
            return
        for pool in self.pools:
            saliency = {kind: self._saliency(kind, self.gates.z[kind]) for kind in pool.shapes}
            keep_ratio = keep_schedule(progress, pool.keep_ratio, self.schedule.start.get(pool.name, 1.0))
            self.gates.support.update(pool.close(saliency, self.gates.support, keep_ratio))

    @torch.no_grad()
    def _saliency(self, kind: str, scales: Tensor) -> Tensor:
        """Return by how much the loss is estimated to change if each gate moves between 0 and its
        scale (1 if closed).

        It is the information per step times the squared scale; experts that were never chosen get a
        neutral value.
        """
        information = self.gates.information[kind] / self.gates.open_steps[kind].clamp_min(1)
        if kind in self.gates.routed:
            information = neutral_where_idle(information, self.gates.routed[kind])
        return information * torch.where(scales > 0, scales.square(), 1.0)

    @torch.no_grad()
    def round(self) -> None:
        """Choose the final support within the budget, by highest saliency, and freeze it."""
        open_gates, gates = self.open_gates(), self.gates
        with raise_on_all_ranks(self.accelerator):
            chosen = self.choose({kind: self._saliency(kind, z) for kind, z in gates.z.items()}, open_gates)
        # an exact choice ends after some minutes with the best selection so far, which depends on
        # the machine
        chosen = broadcast_from_main(self.accelerator, {kind: mask.cpu() for kind, mask in chosen.items()})
        for kind, z in gates.z.items():
            is_open, support = open_gates[kind], chosen[kind].to(z.device)
            gates.searched_z[kind] = z.detach() * is_open
            z[support & ~is_open & (z <= 0)] = REVIVED
            gates.support[kind] = support
            self.rounding[kind] = {
                "raw_sparsity": 1.0 - float(is_open.float().mean()),
                "revived": int((support & ~is_open).sum()),
                "dropped": int((is_open & ~support).sum()),
            }

    def choose(self, saliency: Masks, is_open: Masks) -> Masks:
        """Return the final support, bool [L, U]: as much as the budget allows, open gates before
        closed ones."""
        return {kind: mask for pool in self.pools for kind, mask in pool.choose(saliency, is_open).items()}

    def measure(self, step: int) -> dict[str, float]:
        """Return the metrics of the gates after a step: the sparsity of each module type and
        pool."""
        is_open = self.open_gates()
        values = {f"{kind}_sparsity": 1.0 - float(mask.float().mean()) for kind, mask in is_open.items()}
        shared = [pool for pool in self.pools if pool.name not in is_open]
        return values | {f"{pool.name}_sparsity": pool.removed_share(is_open) for pool in shared}

    def learned(self) -> Learned:
        """Return the final gates, rounded now if the run had no polish."""
        if not self.polishing:
            self.round()
        masks = {kind: mask.detach() for kind, mask in self.forward_masks().items()}
        return Learned(
            gates={kind: mask.float().cpu() for kind, mask in masks.items()},
            z={kind: value.float().cpu() for kind, value in self.gates.searched_z.items()},
            saliency={kind: self._saliency(kind, mask).cpu() for kind, mask in masks.items()},
            rounding=self.rounding,
            rate=self.rate,
            routed={kind: counts.cpu() for kind, counts in self.gates.routed.items()},
        )

    @property
    def extra(self) -> dict[str, Any]:
        """The changes by rounding, and the learning rate of the weights."""
        return super().extra | {"rounding": self.rounding}

    def state(self) -> dict[str, Tensor]:
        return self.gates.save() | super().state()

    def restore(self, step: int, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None:
        super().restore(step, tensors, extra)
        self.gates.load(tensors)
        self.rounding = extra["rounding"]


def natural_step(z: Tensor, gradient: Tensor, information: Tensor, assumed: Tensor) -> Tensor:
    """Return z moved by one natural gradient step, which needs no learning rate (arXiv:1703.00209).

    All tensors have the same shape and are sums over tokens, not means.
    z: scales before the step.
    gradient: sum over the tokens of the step.
    information: sum of squared gradients over all tokens so far, the empirical Fisher information.
        Squares are of the gradient of CE + η·KL; on SmolLM2 they are 1.6 to 2.8 times smaller than
        (1 + η) times the true Fisher information, so a larger η lengthens steps. Correcting this
        made a toy model 0.2 to 1.7 % worse (8 of 8 runs).
    assumed: tokens treated as seen before the first step, in multiples of the tokens seen so far.
        They and PRIOR_PRECISION keep the first steps from following the noise of a few hundred
        tokens.
    """
    return z - gradient / (PRIOR_PRECISION + (1.0 + assumed) * information)


def trainer_of(schedule: Schedule) -> Callable[..., Trainer]:
    """Return the class that learns gates by a schedule."""
    from ddp_prune.core.alm import AlmTrainer  # which changes the search of this file

    return AlmTrainer if schedule.alm else Trainer


def learn(
    gated: GatedModel,
    blocks: Tensor,
    schedule: Schedule,
    pools: Sequence[Pool],
    accelerator: Accelerator,
    progress: Unsaved,
    report: Report,
    training: Training | None = None,
    make: Callable[..., Trainer] | None = None,
    loss_mask: Tensor | None = None,
) -> Learned:
    """Train the gates of a model and return them; resumes from `progress` if it can.

    blocks: int64 [num_blocks, seq_len].
    training: how weights are trained too, if they are.
    make: makes another trainer than that of the schedule.
    loss_mask: as of `Batches`.

    Raises: as `take_steps`.
    """
    with lent(gated.model):  # it is evaluated like the dense model
        batches = Batches(blocks, schedule, accelerator, loss_mask)
        trainer = (make or trainer_of(schedule))(gated, batches, schedule, pools, training)
        take_steps(trainer, progress, report)
    return trainer.learned()
