"""Trained weights: all weights of a model, or low-rank adapters of its projections.

The model computes in its own dtype. AdamW moves float32 masters, of which the weights are rounded copies, so steps that
are smaller than a weight's last digit still add up. Embeddings and output head stay frozen. Of several processes only
the main one keeps whole tensors, for a save and for the checkpoint; they are gathered one at a time.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.core_model_loading import revert_weight_conversion

from ddp_training.loss import OutputHead
from ddp_training.processes import gather_to_main, local_part, scatter_from_main
from ddp_vllm.errors import TrainingError
from ddp_vllm.remote_code.tensors import LAYERS

LEARNING_RATES = {"full": 2e-4, "lora": 1e-3}  # the best of those tried on SmolLM2-135M, whose hidden size is 576
WIDE, WIDE_RATE = 768, 4e-5  # from this hidden size the rate of `full` is lower: 2e-4 ruins Qwen2.5-0.5B (896)
WARMUP = 0.1  # of the steps
BETAS, LARGEST_GRADIENT = (0.9, 0.95), 1.0
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state per parameter
ADAPTER = "default"  # peft's name of the adapter
LEARNED = "weights."  # prefix of these tensors in a saved run; the part and the weight's name follow


def highest_rate(method: str, hidden_size: int) -> float:
    """Return AdamW's learning rate after warm-up. Two hidden sizes were tried, 576 and 896, hence one threshold."""
    return WIDE_RATE if method == "full" and hidden_size >= WIDE else LEARNING_RATES[method]


class TrainedWeights:
    """The trained weights of a model, their float32 masters, and the optimizer of the masters."""

    def __init__(self, model: Any, accelerator: Accelerator, method: str = "full", rank: int = 0) -> None:
        """Make weights trainable; sharded models must not have run forward yet.

        method: `full` trains all weights, `lora` low-rank adapters.
        rank: of the adapters.
        """
        self.model, self.accelerator = model, accelerator
        self.adapted = _add_adapters(model, rank) if method == "lora" else None
        frozen = (model.get_input_embeddings().weight, OutputHead.of(model).weight)
        self.trained: dict[str, nn.Parameter] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if all(parameter is not each for each in frozen) and (self.adapted is None or ".lora_" in name)
        }
        for parameter in self.trained.values():
            if isinstance(parameter, DTensor):  # FSDP sums gradients in the dtype of the rows, and computes in its own
                torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().float()))
            parameter.requires_grad_(True)
        # The masters of float32 weights share their memory.
        self.masters = {name: nn.Parameter(each.detach().float()) for name, each in self.trained.items()}
        kinds = [[each for each in self.masters.values() if isinstance(each, DTensor) is cut] for cut in (False, True)]
        groups = [{"params": masters} for masters in kinds if masters]  # fused AdamW rejects a mixture
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=True)

    def collect(self, share: float = 1.0) -> None:
        """Move the gradients of a backward pass, times `share`, from the weights to the masters."""
        for name, parameter in self.trained.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                master, part = self.masters[name], gradient.float()
                part = part if share == 1.0 else part.mul_(share)
                master.grad = part if master.grad is None else master.grad.add_(part)

    def join(self) -> float:
        """Sum the masters' gradients over all processes, and return the norm of all of them together."""
        world = self.accelerator.num_processes
        squares = torch.zeros(2, device=self.accelerator.device)  # of whole and of sharded gradients
        for master in self.masters.values():
            if master.grad is None:  # this process had no sequence in this step
                master.grad = torch.zeros_like(master)
            if isinstance(master.grad, DTensor):
                master.grad.mul_(world)  # FSDP has averaged them
            elif world > 1:
                master.grad = self.accelerator.reduce(master.grad, "sum")
            is_sharded = int(isinstance(master.grad, DTensor))
            squares[is_sharded] += torch.linalg.vector_norm(local_part(master.grad)).square()
        squares[1] = self.accelerator.reduce(squares[1:], "sum")[0]
        return float(squares.sum().sqrt())

    @torch.no_grad()
    def move(self, rate: float, norm: float) -> None:
        """Do one step of AdamW with gradients of this norm, clipped, and round the masters into the model.

        Raises: TrainingError if the norm is not a number.
        """
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient of the weights is {norm}")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if norm > LARGEST_GRADIENT:
            for master in self.masters.values():
                assert master.grad is not None
                master.grad.mul_(LARGEST_GRADIENT / norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self.trained.items():
            parameter.copy_(self.masters[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Return in the main process everything the next step depends on, as named tensors, and {} in the others.

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
        """Restore what `state` returned after `step` steps; only the main process reads `tensors`.

        All processes must call this together.
        """
        for name, master in self.masters.items():
            moments = {moment: torch.zeros_like(master) for moment in MOMENTS}
            for part, tensor in {"weight": master, **moments}.items():
                saved = tensors[f"{LEARNED}{part}.{name}"] if self.accelerator.is_main_process else None
                scatter_from_main(self.accelerator, tensor, saved)
            self.optimizer.state[master] = {"step": torch.tensor(float(step), device=master.device)} | moments
        self._round()

    def _gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return whole tensors in the main process's host memory, {} in the others."""
        gathered = {name: gather_to_main(self.accelerator, tensor.detach()) for name, tensor in tensors.items()}
        return {name: whole.cpu() for name, whole in gathered.items() if whole is not None}

    @torch.no_grad()
    def finish(self) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Merge what was trained into the model, and return the update of stored weights.

        The returned function takes a weight's name on disk and its stored values. In the main process it returns the
        updated weight, in float32 where anything was trained, so that it is rounded once. All processes must call this
        together, and nothing can be trained afterwards.
        """
        if self.adapted is None:
            trained = self._gathered(self.masters)
        else:
            trained = {}
            for name, parameter, total in _adapter_products(self.model, self.masters):
                parameter.copy_(parameter.float() + _shard_as(parameter, total))
                trained |= self._gathered({name: total})
            self.adapted.unload()  # removes the adapters from the model
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        for held in (self.masters, self.optimizer.state, self.optimizer.param_groups):
            held.clear()
        dtype, adapted = self.model.dtype, self.adapted is not None  # the function below must not hold the model
        stored_as: dict[str, torch.Tensor] = revert_weight_conversion(self.model, trained) if trained else {}

        def updated(name: str, weight: torch.Tensor) -> torch.Tensor:
            if (change := stored_as.get(name)) is None:
                return weight
            if not adapted and weight.dtype == dtype:
                return change.to(weight.device)
            # keep the precision that was dropped when the weight was loaded in a lower dtype
            before = weight.float() if adapted else weight.float() - weight.to(dtype).float()
            return before + change.to(weight.device)

        return updated


def rate_of(step: int, num_steps: int, highest: float, warmup: float, flat_until: int = 0) -> float:
    """Return AdamW's learning rate in a step: a linear warm-up, then a cosine decay to 0.

    warmup: share of the steps.
    flat_until: the step at which the decay begins, if that is later than the end of the warm-up.
    """
    rising = warmup * num_steps
    if step < rising:
        return highest * (step + 1) / (rising + 1)
    falling = max(rising, flat_until)
    return highest * 0.5 * (1.0 + math.cos(math.pi * max(0.0, step - falling) / (num_steps - falling)))


def _add_adapters(model: Any, rank: int) -> Any:
    """Add peft's low-rank adapters to every linear module of the decoder layers, in the dtype of the weights."""
    from peft import LoraConfig, get_peft_model

    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(f"{LAYERS}.")
    ]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
    return get_peft_model(model, config, adapter_name=ADAPTER, autocast_adapter_dtype=False)


def _adapter_products(
    model: Any, factors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Yield each adapted weight's name without peft, the weight, and the product that its adapter adds, in float32."""
    for name, module in model.named_modules():
        if (key := f"{name}.lora_{{}}.{ADAPTER}.weight").format("A") in factors:
            total = factors[key.format("B")] @ factors[key.format("A")] * module.scaling[ADAPTER]
            yield f"{name}.weight", module.get_base_layer().weight, total


def _shard_as(pattern: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return `whole`, which every process has, sharded as `pattern` is, if it is."""
    if not isinstance(pattern, DTensor):
        return whole
    return distribute_tensor(whole, pattern.device_mesh, pattern.placements, src_data_rank=None)
