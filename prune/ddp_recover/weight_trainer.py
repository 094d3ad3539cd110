"""One recovery's steps: the weights of a pruned model learn from the dense one."""

import math
import time
from typing import Any

import torch
from accelerate import Accelerator

from ddp_prune.batches import Batches, Teacher
from ddp_prune.loss import OutputHead, distilled_loss, final_hidden
from ddp_prune.recipe import RecoveryRecipe
from ddp_prune.weights import LearningWeights, rate_of
from ddp_vllm.errors import TrainingError


class WeightTrainer:
    """One recovery: the pruned model, the dense one it learns from, and the one step that moves its weights."""

    def __init__(self, student: Any, dense: Any, recipe: RecoveryRecipe, accelerator: Accelerator) -> None:
        """Make the student's weights learn; `read` says on what."""
        self.student, self.dense, self.recipe, self.accelerator = student, dense, recipe, accelerator
        self.head, self.dense_head = OutputHead.of(student), OutputHead.of(dense)
        self.weights = LearningWeights(student, accelerator, recipe.method, recipe.rank)

    def read(self, batches: Batches, recipe: RecoveryRecipe) -> None:
        """Learn from these blocks."""
        self.batches, self.recipe = batches, recipe
        self.teacher = Teacher(self.dense, batches) if recipe.distillation > 0 else None

    def seconds_a_step(self) -> float:
        """Return how long a step takes on the batches given; nothing is learned. All processes get the slowest's."""
        for _ in range(2):  # the first one warms up
            began = time.perf_counter()
            if math.isfinite(length := self._gradients(0)[2]):
                self.weights.move(0.0, length)
            seconds = time.perf_counter() - began
        self.weights.optimizer.state.clear()
        self.weights.optimizer.zero_grad()  # of a step that was no number, which a run will meet and say
        return float(self.accelerator.gather(torch.tensor([seconds], device=self.accelerator.device)).max())

    @property
    def extra(self) -> dict[str, Any]:
        """What a saved run needs beside tensors."""
        return {}

    def step(self, step: int) -> dict[str, float]:
        """Do one optimizer step and return its metrics. Raises: TrainingError if the loss is not a number."""
        recipe = self.recipe
        cross_entropy, divergence, length = self._gradients(step)
        loss = cross_entropy + recipe.distillation * divergence
        rate = rate_of(step, recipe.steps, recipe.learning_rate, recipe.warmup)
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} at step {step + 1}")
        self.weights.move(rate, length)
        distilled = {"kl": divergence} if self.teacher else {}
        return {"step": step + 1, "loss": loss, "ce": cross_entropy} | distilled | {"learning_rate": rate}

    def _gradients(self, step: int) -> tuple[float, float, float]:
        """Give the masters the gradient of a step; return CE and KL in nats a token, and the gradient's length."""
        losses = torch.zeros(2, device=self.accelerator.device)
        for numbers in self.batches.step(step):
            losses += self._backward(step, numbers)
        cross_entropy, divergence = self.accelerator.reduce(losses, "sum").tolist()
        return cross_entropy, divergence, self.weights.join()

    def _backward(self, step: int, numbers: list[int]) -> torch.Tensor:
        """Add one micro-batch's part of the step's gradient to the masters'; return its part of [CE, KL]."""
        tokens = self.batches.blocks[numbers].to(self.accelerator.device)
        teacher = self.teacher.hidden(tokens, numbers) if self.teacher else None
        student, labels = final_hidden(self.student, tokens), tokens[:, 1:].flatten()
        share = len(numbers) / self.batches.size
        # every token has something to learn of the teacher, but only those that count of the text itself
        weights = self.batches.weights(step, numbers)
        loss, cross_entropy, divergence = distilled_loss(
            student, teacher, self.head, labels, self.recipe.distillation, self.dense_head, weights
        )
        (loss * share).backward()
        self.weights.collect()
        return share * torch.tensor([cross_entropy, divergence], device=tokens.device)

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything the next step depends on, as named tensors; all processes must call it together."""
        return self.weights.state()

    def restore(self, step: int, tensors: dict[str, torch.Tensor], _extra: dict[str, Any]) -> None:
        """Take back what `state` returned before `step`; all processes must call it together."""
        self.weights.restore(step, tensors)
