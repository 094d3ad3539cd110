"""The weights of a pruned model learn from the dense one: all of them, or low-rank additions to its projections.

The model computes in its own number format. AdamW moves float32 masters, of which the weights are rounded copies, so
steps that are smaller than a weight's last digit still add up. Embeddings and output head stay as they are.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.core_model_loading import revert_weight_conversion

from ddp_prune.loss import OutputHead, distilled_loss, final_hidden
from ddp_prune.recipe import RecoveryRecipe
from ddp_prune.trainer import Batches, Teacher
from ddp_vllm.errors import TrainingError
from ddp_vllm.remote_code.tensors import LAYERS

LEARNING_RATES = {"full": 2e-4, "lora": 1e-3}  # the best of those tried (log 105)
BETAS, LARGEST_GRADIENT = (0.9, 0.95), 1.0
MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter
ADAPTER = "default"  # peft's name of the additions


class WeightTrainer:
    """One recovery: the weights that learn, their optimizer, and the one step that moves them."""

    def __init__(self, student: Any, dense: Any, recipe: RecoveryRecipe, accelerator: Accelerator) -> None:
        """Make the student's weights learn; `read` says on what."""
        self.student, self.dense, self.recipe, self.accelerator = student, dense, recipe, accelerator
        self.head, self.dense_head = OutputHead.of(student), OutputHead.of(dense)
        self.adapted = _add_low_rank(student, recipe.rank) if recipe.method == "lora" else None
        outside = (student.get_input_embeddings().weight, self.head.weight)
        self.learning: dict[str, nn.Parameter] = {
            name: parameter
            for name, parameter in student.named_parameters()
            if all(parameter is not each for each in outside) and (self.adapted is None or ".lora_" in name)
        }
        for parameter in self.learning.values():
            parameter.requires_grad_(True)
        self.masters = {name: nn.Parameter(each.detach().float().clone()) for name, each in self.learning.items()}
        kinds = [[each for each in self.masters.values() if isinstance(each, DTensor) is cut] for cut in (False, True)]
        groups = [{"params": masters} for masters in kinds if masters]  # its fused kernel takes no mixture
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=True)

    def read(self, batches: Batches, scored: torch.Tensor, recipe: RecoveryRecipe) -> None:
        """Learn from these blocks. scored: bool [num_blocks, seq_len], the tokens that count, one a block at least."""
        self.batches, self.scored, self.recipe = batches, scored, recipe
        self.teacher = Teacher(self.dense, batches) if recipe.distillation > 0 else None

    def seconds_a_step(self) -> float:
        """Return how long a step takes on the batches given; nothing is learned. All processes get the slowest's."""
        for _ in range(2):  # the first one warms up
            began = time.perf_counter()
            if math.isfinite(self._gradients(0)[2]):
                self._move(0.0, 1.0)
            seconds = time.perf_counter() - began
        self.optimizer.state.clear()
        return float(self.accelerator.gather(torch.tensor([seconds], device=self.accelerator.device)).max())

    @property
    def extra(self) -> dict[str, Any]:
        """What a saved run needs beside tensors."""
        return {}

    def step(self, step: int) -> dict[str, float]:
        """Do one optimizer step and return its metrics. Raises: TrainingError if the loss is not a number."""
        cross_entropy, divergence, length = self._gradients(step)
        loss, rate = cross_entropy + self.recipe.distillation * divergence, self.rate(step)
        if not math.isfinite(loss) or not math.isfinite(length):
            raise TrainingError(f"the loss is {loss} and its gradient {length} at step {step + 1}")
        self._move(rate, min(1.0, LARGEST_GRADIENT / max(length, 1e-12)))
        distilled = {"kl": divergence} if self.teacher else {}
        return {"step": step + 1, "loss": loss, "ce": cross_entropy} | distilled | {"learning_rate": rate}

    def rate(self, step: int) -> float:
        """Return AdamW's rate in a step: it rises linearly, then falls to 0 along a cosine."""
        warmup, highest = self.recipe.warmup * self.recipe.steps, self.recipe.learning_rate
        if step < warmup:
            return highest * (step + 1) / (warmup + 1)
        return highest * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (self.recipe.steps - warmup)))

    def _gradients(self, step: int) -> tuple[float, float, float]:
        """Give the masters the gradient of a step; return CE and KL in nats a token, and the gradient's length."""
        counted = int(self.scored[self.batches.numbers(step), 1:].sum())
        losses = torch.zeros(2, device=self.accelerator.device)
        for numbers in self.batches.step(step):
            losses += self._backward(numbers, counted)
        cross_entropy, divergence = self.accelerator.reduce(losses, "sum").tolist()
        return cross_entropy, divergence, self._join_gradients()

    def _backward(self, numbers: list[int], counted: int) -> torch.Tensor:
        """Add one micro-batch's part of the step's gradient to the masters'; return its part of [CE, KL]."""
        tokens = self.batches.blocks[numbers].to(self.accelerator.device)
        chosen = self.scored[numbers, 1:].flatten().to(tokens.device)
        labels, share = tokens[:, 1:].flatten()[chosen], float(chosen.sum()) / counted
        teacher = self.teacher.hidden(tokens, numbers)[chosen] if self.teacher else None
        student = final_hidden(self.student, tokens)[chosen]
        loss, cross_entropy, divergence = distilled_loss(
            student, teacher, self.head, labels, self.recipe.distillation, self.dense_head
        )
        (loss * share).backward()
        for name, parameter in self.learning.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                master = self.masters[name]
                master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
        return share * torch.tensor([cross_entropy, divergence], device=tokens.device)

    def _join_gradients(self) -> float:
        """Sum the masters' gradients over all processes and return the length of all of them together."""
        world = self.accelerator.num_processes
        squares = torch.zeros(2, device=self.accelerator.device)  # of whole and of cut ones
        for master in self.masters.values():
            if master.grad is None:  # of a process without a sequence in this step
                master.grad = torch.zeros_like(master)
            if isinstance(master.grad, DTensor):
                master.grad.mul_(world)  # FSDP has taken their mean
            elif world > 1:
                master.grad = self.accelerator.reduce(master.grad, "sum")
            is_cut = int(isinstance(master.grad, DTensor))
            squares[is_cut] += torch.linalg.vector_norm(local_part(master.grad)).square()
        squares[1] = self.accelerator.reduce(squares[1:], "sum")[0]
        return float(squares.sum().sqrt())

    @torch.no_grad()
    def _move(self, rate: float, scale: float) -> None:
        """Let AdamW move the masters by their gradients times `scale`, and round them into the model."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if scale < 1.0:
            for master in self.masters.values():
                assert master.grad is not None
                master.grad.mul_(scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self.learning.items():
            parameter.copy_(self.masters[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything the next step depends on, as named tensors; all processes must call it together."""
        parts = {"weight": self.masters} | {
            moment: {name: self.optimizer.state[master][moment] for name, master in self.masters.items()}
            for moment in MOMENTS
            if self.optimizer.state
        }
        return {f"{part}.{name}": _whole(each) for part, tensors in parts.items() for name, each in tensors.items()}

    @torch.no_grad()
    def restore(self, step: int, tensors: dict[str, torch.Tensor], _extra: dict[str, Any]) -> None:
        """Take back what `state` returned after `step` steps; all processes must call it together."""
        for name, master in self.masters.items():
            master.copy_(_like(master, tensors[f"weight.{name}"]))
            moments = {each: _like(master, tensors[f"{each}.{name}"]) for each in MOMENTS}
            self.optimizer.state[master] = {"step": torch.tensor(float(step), device=master.device)} | moments
        self._round()

    @torch.no_grad()
    def finish(self) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Merge what was learned into the student; return how a stored weight, by its name on disk, is made of it.

        What that function returns is float32 where anything was learned, so that it can be rounded once. All processes
        must call this together.
        """
        learned = {name: _whole(each) for name, each in self.masters.items()}
        if self.adapted is not None:
            learned = _low_rank_sums(self.student, learned)
            self.adapted.unload()  # takes the additions out of the student again
        stored = revert_weight_conversion(self.student, dict(self.student.named_parameters()))
        names = {id(parameter): name for name, parameter in self.student.named_parameters()}
        on_disk = {name: names[id(parameter)] for name, parameter in stored.items()}

        def become(name: str, weight: torch.Tensor) -> torch.Tensor:
            if (change := learned.get(on_disk.get(name, ""))) is None:
                return weight
            change = _like(weight, change)
            if self.adapted is None and weight.dtype == self.student.dtype:
                return change
            # what the weight lost when it was loaded in another format, it shall not lose for good
            return weight.float() + (change if self.adapted else change - weight.to(self.student.dtype).float())

        for name, parameter in stored.items():
            parameter.copy_(become(name, parameter.detach()))
            parameter.requires_grad_(False)
        return become


def _add_low_rank(student: Any, rank: int) -> Any:
    """Put peft's low-rank additions on every linear layer of the decoder layers, in the format of the weights."""
    from peft import LoraConfig, get_peft_model

    names = [
        name
        for name, module in student.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(f"{LAYERS}.")
    ]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
    return get_peft_model(student, config, adapter_name=ADAPTER, autocast_adapter_dtype=False)


def _low_rank_sums(student: Any, factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what each adapted weight gets added, float32, by the name it has without peft."""
    sums = {}
    for name, module in student.named_modules():
        if (key := f"{name}.lora_{{}}.{ADAPTER}.weight").format("A") in factors:
            sums[f"{name}.weight"] = factors[key.format("B")] @ factors[key.format("A")] * module.scaling[ADAPTER]
    return sums


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor that may be cut over processes."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached copy in host memory; of a tensor that is cut over processes, all of it in each of them."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _like(pattern: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` where `pattern` is, and cut over processes as that is."""
    value = value.to(pattern.device)
    return distribute_tensor(value, pattern.device_mesh, pattern.placements) if isinstance(pattern, DTensor) else value
