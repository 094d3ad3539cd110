"""Weights that learn: all of a model, or low-rank additions to its projections.

The model computes in its own number format. AdamW moves float32 masters, of which the weights are rounded copies, so
steps that are smaller than a weight's last digit still add up. Embeddings and output head stay as they are.
With several processes only the main one gathers whole tensors, for a save and for the checkpoint, one after the other.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.core_model_loading import revert_weight_conversion

from ddp_prune.distributed import local_part
from ddp_prune.loss import OutputHead
from ddp_vllm.errors import TrainingError
from ddp_vllm.remote_code.tensors import LAYERS

LEARNING_RATES = {"full": 2e-4, "lora": 1e-3}  # the best of those tried, on SmolLM2, 576 wide (log 105)
WIDE, WIDE_RATE = 768, 4e-5  # hidden size from which on the rate of `full` is lower: 2e-4 ruins Qwen2.5-0.5B (log 122)
WARMUP = 0.1  # of the steps
BETAS, LARGEST_GRADIENT = (0.9, 0.95), 1.0
MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter
ADAPTER = "default"  # peft's name of the additions
LEARNED = "weights."  # and the part and the weight: the names of tensors in a saved run


def highest_rate(method: str, hidden_size: int) -> float:
    """Return the rate of AdamW after its warm-up. Two models were tried, 576 and 896 wide, so it is a step."""
    return WIDE_RATE if method == "full" and hidden_size >= WIDE else LEARNING_RATES[method]


class LearningWeights:
    """The weights of a model that learn, their float32 masters, and the optimizer that moves these."""

    def __init__(self, model: Any, accelerator: Accelerator, method: str = "full", rank: int = 0) -> None:
        """Make them learn; before the first forward pass of a model that is cut over processes.

        method: `full` or `lora`; rank: of the additions of `lora`.
        """
        self.model, self.accelerator = model, accelerator
        self.adapted = _add_low_rank(model, rank) if method == "lora" else None
        outside = (model.get_input_embeddings().weight, OutputHead.of(model).weight)
        self.learning: dict[str, nn.Parameter] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if all(parameter is not each for each in outside) and (self.adapted is None or ".lora_" in name)
        }
        for parameter in self.learning.values():
            if isinstance(parameter, DTensor):  # FSDP sums gradients in the format of the rows, and computes in its own
                torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().float()))
            parameter.requires_grad_(True)
        # of float32 weights the masters share the memory
        self.masters = {name: nn.Parameter(each.detach().float()) for name, each in self.learning.items()}
        kinds = [[each for each in self.masters.values() if isinstance(each, DTensor) is cut] for cut in (False, True)]
        groups = [{"params": masters} for masters in kinds if masters]  # its fused kernel takes no mixture
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=True)

    def collect(self, share: float = 1.0) -> None:
        """Add `share` of what a backward pass left at the weights to the masters' gradients."""
        for name, parameter in self.learning.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                master, part = self.masters[name], gradient.float()
                part = part if share == 1.0 else part.mul_(share)
                master.grad = part if master.grad is None else master.grad.add_(part)

    def join(self) -> float:
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
    def move(self, rate: float, length: float) -> None:
        """Let AdamW move the masters by their gradients, of this length together, and round them into the model.

        Raises: TrainingError if the length is not a number.
        """
        if not math.isfinite(length):
            raise TrainingError(f"the gradient of the weights is {length}")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if length > LARGEST_GRADIENT:
            for master in self.masters.values():
                assert master.grad is not None
                master.grad.mul_(LARGEST_GRADIENT / length)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self.learning.items():
            parameter.copy_(self.masters[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything the next step depends on, as named tensors: in the main process, and {} in the others.

        All processes must call this together.
        """
        parts = {"weight": self.masters} | {
            moment: {name: self.optimizer.state[master][moment] for name, master in self.masters.items()}
            for moment in MOMENTS
            if self.optimizer.state
        }
        return self._gathered({f"{LEARNED}{part}.{name}": each for part in parts for name, each in parts[part].items()})

    @torch.no_grad()
    def restore(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state` returned after `step` steps; `tensors` are read in the main process alone.

        All processes must call this together.
        """
        main = self.accelerator.is_main_process
        for name, master in self.masters.items():
            moments = {moment: torch.zeros_like(master) for moment in MOMENTS}
            for part, tensor in {"weight": master, **moments}.items():
                self._from_main(tensor, tensors[f"{LEARNED}{part}.{name}"] if main else None)
            self.optimizer.state[master] = {"step": torch.tensor(float(step), device=master.device)} | moments
        self._round()

    def _gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return whole tensors in the main process's host memory, {} in the others."""
        found = {name: self._to_main(tensor.detach()) for name, tensor in tensors.items()}
        return {name: whole.cpu() for name, whole in found.items() if whole is not None}

    def _to_main(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return all of a tensor in the main process, None in the others."""
        main, part = self.accelerator.is_main_process, local_part(tensor)
        if not isinstance(tensor, DTensor):
            return part if main else None
        if not main:
            if part.numel():
                distributed.send(part.contiguous(), 0)
            return None
        whole = torch.empty(tensor.shape, dtype=part.dtype, device=part.device)
        for rank, rows in enumerate(whole.chunk(self.accelerator.num_processes)):  # as FSDP cuts them
            if rank:
                distributed.recv(rows, rank)
            else:
                rows.copy_(part)
        return whole

    def _from_main(self, tensor: torch.Tensor, whole: torch.Tensor | None) -> None:
        """Copy into a tensor, or the rows of it that are here, what the main process has as `whole`; None elsewhere."""
        part = local_part(tensor)
        if whole is not None:
            pieces = whole.chunk(self.accelerator.num_processes) if isinstance(tensor, DTensor) else [whole]
            part.copy_(pieces[0])
            for rank, rows in enumerate(pieces[1:], 1):
                distributed.send(rows.to(part.device).contiguous(), rank)
        elif isinstance(tensor, DTensor) and part.numel():
            distributed.recv(part, 0)
        if self.accelerator.num_processes > 1 and not isinstance(tensor, DTensor):
            distributed.broadcast(part, 0)

    @torch.no_grad()
    def finish(self) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Merge what was learned into the model; return how a stored weight, by its name on disk, is made of it.

        What that function returns is float32 where anything was learned, so that it can be rounded once. It is for the
        main process; the others hold nothing. All must call this together, and nothing can be trained afterwards.
        """
        if self.adapted is None:
            learned = self._gathered(self.masters)
        else:
            learned = {}
            for name, parameter, total in _low_rank_sums(self.model, self.masters):
                parameter.copy_(parameter.float() + _cut_as(parameter, total))
                learned |= self._gathered({name: total})
            self.adapted.unload()  # takes the additions out of the model again
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        for held in (self.masters, self.optimizer.state, self.optimizer.param_groups):
            held.clear()
        dtype, adapted = self.model.dtype, self.adapted is not None  # all that outlives the model
        # their names on disk
        stored_as: dict[str, torch.Tensor] = revert_weight_conversion(self.model, learned) if learned else {}

        def become(name: str, weight: torch.Tensor) -> torch.Tensor:
            if (change := stored_as.get(name)) is None:
                return weight
            if not adapted and weight.dtype == dtype:
                return change.to(weight.device)
            # what the weight lost when it was loaded in another format, it shall not lose for good
            before = weight.float() if adapted else weight.float() - weight.to(dtype).float()
            return before + change.to(weight.device)

        return become


def rate_of(step: int, num_steps: int, highest: float, warmup: float, flat_until: int = 0) -> float:
    """Return AdamW's rate in a step: it rises linearly over `warmup` of the steps, then falls to 0 along a cosine.

    flat_until: the step at which it begins to fall, if that is later.
    """
    rising = warmup * num_steps
    if step < rising:
        return highest * (step + 1) / (rising + 1)
    falling = max(rising, flat_until)
    return highest * 0.5 * (1.0 + math.cos(math.pi * max(0.0, step - falling) / (num_steps - falling)))


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


def _low_rank_sums(
    student: Any, factors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Yield each adapted weight by the name it has without peft, and what it gets added, in float32."""
    for name, module in student.named_modules():
        if (key := f"{name}.lora_{{}}.{ADAPTER}.weight").format("A") in factors:
            total = factors[key.format("B")] @ factors[key.format("A")] * module.scaling[ADAPTER]
            yield f"{name}.weight", module.get_base_layer().weight, total


def _cut_as(pattern: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value`, which every process has, cut over processes as `pattern` is."""
    if not isinstance(pattern, DTensor):
        return value
    return distribute_tensor(value, pattern.device_mesh, pattern.placements, src_data_rank=None)
