"""The optimizer step of a recovery, which trains the weights of a pruned model on the dense model's
outputs."""

import math
import time
from typing import Any

import torch

from ddp_prune.core.batches import Batches, Teacher
from ddp_prune.core.loss import OutputHead, distill, final_hidden
from ddp_prune.core.weights import TrainedWeights, rate_of, step_seed
from ddp_prune.recovery_recipe import RecoveryRecipe
from ddp_vllm.errors import TrainingError


class WeightTrainer:
    """Trains the weights of a pruned model to minimize cross-entropy + distillation · KL(dense ‖
    pruned), step by step.

    student: the pruned model. dense: its teacher. weights: those of the student that are trained.
    batches: the text, with its loss mask.
    """

    def __init__(
        self, student: Any, dense: Any, weights: TrainedWeights, batches: Batches, recipe: RecoveryRecipe
    ) -> None:
        self.student, self.weights, self.batches = student, weights, batches
        self.recipe, self.accelerator = recipe, batches.accelerator
        assert recipe.learning_rate is not None  # resolved
        self.highest = recipe.learning_rate
        self.head, self.dense_head = OutputHead.of(student), OutputHead.of(dense)
        self.teacher = Teacher(dense, batches) if recipe.distillation > 0 else None

    def seconds_a_step(self) -> float:
        """Return the seconds per step, of the slowest process; no weight changes."""
        for _ in range(2):  # the first step warms up
            began = time.perf_counter()
            if math.isfinite(norm := self._gradients(0)[2]):
                self.weights.step(0.0, norm)
            seconds = time.perf_counter() - began
        # also gradients that are not finite, which the run will report
        self.weights.reset_optimizer()
        return float(self.accelerator.gather(torch.tensor([seconds], device=self.accelerator.device)).max())

    @property
    def extra(self) -> dict[str, Any]:
        """Plain data that a saved run requires in addition to the tensors."""
        return {}

    def begin(self) -> None:
        """Do nothing: the first step requires nothing."""

    def step(self, step: int) -> dict[str, float]:
        """Do one optimizer step and return its metrics. Raises: TrainingError if the loss is not a
        number."""
        recipe = self.recipe
        cross_entropy, divergence, norm = self._gradients(step)
        loss = cross_entropy + recipe.distillation * divergence
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} at step {step + 1}")
        rate = rate_of(step, recipe.steps, self.highest, recipe.warmup)
        self.weights.step(rate, norm, step_seed(recipe.seed, step))
        distilled = {"kl": divergence} if self.teacher else {}
        return {"step": step + 1, "loss": loss, "ce": cross_entropy} | distilled | {"learning_rate": rate}

    def remedy(self, _step: int) -> str:
        """Return what the user can do if the loss of a step is not a number."""
        return f"try a --learning-rate below {self.highest:g}"

    def _gradients(self, step: int) -> tuple[float, float, float]:
        """Compute the gradients of a step; return CE and KL in nats per token, and the gradients'
        norm."""
        losses = torch.zeros(2, device=self.accelerator.device)
        for batch in self.batches.step(step):
            teacher_NH = self.teacher.hidden(batch) if self.teacher else None
            student_NH = final_hidden(self.student, batch.tokens)
            # the loss mask applies only to the cross-entropy: the teacher has an output for every
            # token
            loss, metrics = distill(
                student_NH, teacher_NH, self.head, batch.labels_N, self.recipe.distillation, self.dense_head,
                batch.loss_mask_N,
            )  # fmt: skip
            (loss * batch.share).backward()
            losses += batch.share * metrics
        cross_entropy, divergence = self.accelerator.reduce(losses, "sum").tolist()
        return cross_entropy, divergence, self.weights.reduce_gradients()

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything the next step depends on, as named tensors; all processes must call it
        together."""
        return self.weights.state()

    def like(self, name: str) -> torch.Tensor | None:
        """Return the tensor that a saved one is read into."""
        return self.weights.like(name)

    def restore(self, step: int, tensors: dict[str, torch.Tensor], _extra: dict[str, Any]) -> None:
        """Restore the `state` that was saved before `step`; all processes must call it together."""
        self.weights.restore(step, tensors)
