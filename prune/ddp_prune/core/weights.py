"""Trained weights: all weights of a model, or low-rank adapters of its projections.

Embeddings and output head stay frozen. The gradient of a weight is added to a sum as soon as
backward has it, and then freed. Two optimizers move the weights:

- `adamw` moves float32 masters, of which the weights are rounded copies, so steps that are smaller
  than a weight's last digit still add up. Sums of gradients and moments are float32.
- `adamw-8bit` (torchao) moves 16-bit weights themselves and rounds them stochastically, so small
  steps add up on average. Moments have 8 bits (arXiv:2110.02861), sums of gradients the dtype of
  the weights.

Sharded weights are saved by the processes that hold them, and gathered one by one for the
checkpoint.
"""

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.core_model_loading import revert_weight_conversion

from ddp_prune.core.decoder import decoder_layers, decoder_of
from ddp_prune.core.loss import OutputHead
from ddp_vllm.errors import TrainingError

# the best of those tried on SmolLM2-135M, whose hidden size is 576
LEARNING_RATES = {"weights": 2e-4, "lora": 1e-3}
# from this hidden size the rate of `weights` is lower: 4e-5 harms Qwen2.5-Coder-0.5B (896)
WIDE, WIDE_RATE = 768, 1e-5
BETAS, LARGEST_GRADIENT = (0.9, 0.95), 1.0
MOMENTS = ("exp_avg", "exp_avg_sq")  # the state of both optimizers per parameter
ADAPTER = "default"  # peft's name of the adapter
# prefix of these tensors in a saved run; the part and the weight's name follow
LEARNED = "weights."
RANK = 16  # of adapters
OPTIMIZERS = ("adamw", "adamw-8bit")  # from the one that requires the most memory


def highest_rate(train: str, hidden_size: int) -> float:
    """Return AdamW's learning rate after warm-up, where nothing better is known. Two hidden sizes
    were tried."""
    return WIDE_RATE if train == "weights" and hidden_size >= WIDE else LEARNING_RATES[train]


def local_part(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor that this process holds: all of them unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TrainedWeights:
    """The trained weights of a model, the sums of their gradients, and their optimizer."""

    def __init__(
        self, model: Any, accelerator: Accelerator, train: str = "weights", rank: int = RANK, optimizer: str = "adamw"
    ) -> None:
        """Make weights trainable; sharded models must not have run forward yet.

        train: `weights` trains all weights, `lora` low-rank adapters.
        rank: of the adapters.
        optimizer: one of OPTIMIZERS.
        """
        assert optimizer in OPTIMIZERS, optimizer
        self.model, self.accelerator, self.in_8_bits = model, accelerator, optimizer == "adamw-8bit"
        self.adapted = train == "lora"
        if self.adapted:
            _add_adapters(model, rank)
        embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        frozen = {*map(id, embeddings), id(OutputHead.of(model).weight)}
        language = {id(parameter) for parameter in decoder_of(model).parameters()} - frozen
        self.trained: dict[str, nn.Parameter] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if id(parameter) in language and (not self.adapted or ".lora_" in name)
        }
        for parameter in self.trained.values():
            # FSDP sums gradients in the dtype of the rows, and computes in its own
            if isinstance(parameter, DTensor) and not self.in_8_bits:
                torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().float()))
            parameter.requires_grad_(True)
        hook = Tensor.register_post_accumulate_grad_hook
        # a hook that held this object would keep the model in memory for good
        proxy = weakref.proxy(self)
        self.hooks = [
            hook(parameter, partial(TrainedWeights._add, proxy, name)) for name, parameter in self.trained.items()
        ]
        self.share, self.sums, self.first = 1.0, dict[str, Tensor](), dict[str, Tensor]()
        if self.in_8_bits:
            self.masters: dict[str, nn.Parameter] = dict(self.trained)
            # AdamW moves each number on its own, so it can be given a process's own rows, which
            # share their memory.
            self.moved = {name: nn.Parameter(local_part(weight.detach())) for name, weight in self.trained.items()}
            self.optimizer: Any = _adamw_8bit(list(self.moved.values()))
            return
        # The masters of float32 weights share their memory.
        self.moved = self.masters = {
            name: nn.Parameter(weight.detach().float()) for name, weight in self.trained.items()
        }
        sharded = [master for master in self.masters.values() if isinstance(master, DTensor)]
        unsharded = [master for master in self.masters.values() if not isinstance(master, DTensor)]
        # fused AdamW rejects a mixture
        groups = [{"params": masters} for masters in (unsharded, sharded) if masters]
        if self.adapted:
            self.first = {name: weight.detach().clone() for name, weight in self.masters.items()}
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=True)

    @contextmanager
    def adapters_disabled(self) -> Iterator[None]:
        """Let the model compute without its adapters inside the block."""
        modules = [module for module in self.model.modules() if hasattr(module, "lora_A")]
        scales = [module.scaling[ADAPTER] for module in modules]
        for module in modules:
            module.scaling[ADAPTER] = 0.0
        try:
            yield
        finally:
            for module, scale in zip(modules, scales, strict=True):
                module.scaling[ADAPTER] = scale

    @contextmanager
    def accumulating(self, share: float) -> Iterator[None]:
        """Add the gradients of backward passes inside the block to the sums, times `share`."""
        self.share = share
        yield
        self.share = 1.0

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        """Move a gradient that backward has finished to its sum."""
        assert parameter.grad is not None
        part, parameter.grad = parameter.grad if self.in_8_bits else parameter.grad.float(), None
        part = part if self.share == 1.0 else part.mul_(self.share)
        self.sums[name] = self.sums[name].add_(part) if name in self.sums else part

    def reduce_gradients(self) -> float:
        """Sum the gradients over all processes, and return the norm of all of them together."""
        world = self.accelerator.num_processes
        for name, master in self.masters.items():
            if (total := self.sums.get(name)) is None:  # this process had no sequence in this step
                total = torch.zeros_like(master)
            if isinstance(total, DTensor):
                total.mul_(world)  # FSDP has averaged them
            elif world > 1:
                total = self.accelerator.reduce(total, "sum")
            self.sums[name] = total
        # the squared norms of whole gradients and of sharded ones
        squares = torch.zeros(2, device=self.accelerator.device)
        for number in range(2):
            # in the order of the masters: `sums` has that of backward
            totals = [self.sums[name] for name in self.masters]
            parts = [local_part(total) for total in totals if isinstance(total, DTensor) == bool(number)]
            if parts:
                norms = torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32))
                # numpy adds them one after the other, in every process alike
                squares[number] = float(numpy.add.accumulate(norms.square().cpu().numpy())[-1])
        squares[1] = self.accelerator.reduce(squares[1:], "sum")[0]
        return float(squares.sum().sqrt())

    @torch.no_grad()
    def step(self, rate: float, norm: float, seed: int = 0) -> None:
        """Do one step of AdamW with gradients of this norm, clipped, and round the masters into the
        model.

        seed: of stochastic rounding; the same in all processes, another one for each step.
        Raises: TrainingError if the norm is not a number.
        """
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient of the weights is {norm}")
        for group in self.optimizer.param_groups:
            if self.in_8_bits:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if norm > LARGEST_GRADIENT:
            torch._foreach_mul_([local_part(total) for total in self.sums.values()], LARGEST_GRADIENT / norm)
        for name, moved in self.moved.items():
            total = self.sums.pop(name)
            moved.grad = local_part(total) if self.in_8_bits else total
        self._step(seed)
        self._round()

    def _step(self, seed: int) -> None:
        """Let the optimizer move the masters, and free their gradients."""
        device = self.accelerator.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), warnings.catch_warnings():
            if self.in_8_bits:
                torch.manual_seed(seed)
                # advice for torchao
                warnings.filterwarnings("ignore", ".*_stable_hash_for_caching")
            self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def _round(self) -> None:
        pairs = [
            (local_part(parameter), local_part(self.masters[name]))
            for name, parameter in self.trained.items()
            if parameter is not self.masters[name]
        ]
        if pairs:
            rounded, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(rounded, masters)

    @torch.no_grad()
    def reset(self, dense: Any) -> None:
        """Begin again, with the first adapters or the weights of the dense model, which is loaded
        like this one."""
        weights = self.first or dict(dense.named_parameters())
        for name, master in self.masters.items():
            master.copy_(weights[name])
        self.reset_optimizer()
        self._round()

    def reset_optimizer(self) -> None:
        """Drop the optimizer's moments and all gradients."""
        self.optimizer.state.clear()
        self.sums.clear()

    def state(self) -> dict[str, Tensor]:
        """Return everything the next step depends on, as named tensors; sharded ones stay sharded."""
        tensors = {f"{LEARNED}weight.{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items() if self.optimizer.state else ():
            tensors |= {f"{LEARNED}{part}.{name}": values for part, values in self._moments(name, master).items()}
        return tensors

    def like(self, name: str) -> Tensor | None:
        """Return the tensor that a saved one is read into: the weight itself, or a new moment; None
        for other tensors."""
        part, _, weight = name.removeprefix(LEARNED).partition(".")
        if not name.startswith(LEARNED) or part not in ("weight", *MOMENTS):
            return None
        master = self.masters[weight].detach()
        return master if part == "weight" else torch.zeros_like(master)

    @torch.no_grad()
    def restore(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned after `step` steps, read into what `like` returned."""
        if self.in_8_bits and step:  # a step without gradients makes moments
            for moved in self.moved.values():
                moved.grad = torch.zeros_like(moved)
            self._step(0)
        for name, master in self.masters.items() if step else ():
            if self.in_8_bits:
                self.optimizer.state[self.moved[name]]["step"].fill_(step)
                for part, values in self._moments(name, master).items():
                    values.copy_(tensors[f"{LEARNED}{part}.{name}"])
            else:
                moments = {moment: tensors[f"{LEARNED}{moment}.{name}"].to(master.device) for moment in MOMENTS}
                self.optimizer.state[master] = {"step": torch.tensor(float(step), device=master.device)} | moments
        self._round()

    def _moments(self, name: str, master: Tensor) -> dict[str, Tensor]:
        """Return the moments of a weight as plain tensors by their names in a saved run.

        8-bit moments share a scale per 256 numbers of a process, so those of a sharded weight have
        the rank in their names, and as many processes must read them.
        """
        state = self.optimizer.state[self.moved[name]]
        if not self.in_8_bits:
            return {moment: state[moment] for moment in MOMENTS}
        rank = f"-{self.accelerator.process_index}" if isinstance(master, DTensor) else ""
        parts = dict[str, Tensor]()
        for moment in MOMENTS:
            values = state[moment]
            if hasattr(values, "codes"):
                parts |= {f"{moment}-codes{rank}": values.codes, f"{moment}-scale{rank}": values.scale}
            else:  # too small to be quantized
                parts[f"{moment}-values{rank}"] = values
        return parts

    @torch.no_grad()
    def finish(self) -> "UpdatedWeights":
        """Merge what was trained into the model, and return the update of stored weights.

        The returned function takes a weight's name on disk and its stored values. In the main
        process it returns the updated weight, in float32 where anything was trained, so that it is
        rounded once. All processes must call this together, and nothing can be trained afterwards.
        """
        gathered = dict[str, Tensor]()
        for name, master in self.masters.items() if not self.adapted else ():
            unsharded = master.full_tensor() if isinstance(master, DTensor) else master
            if self.accelerator.is_main_process:
                gathered[name] = unsharded.detach().cpu()
        # by names on disk
        trained = revert_weight_conversion(self.model, gathered) if gathered else {}
        products = self._merge_adapters() if self.adapted else {}
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        for hook in self.hooks:
            hook.remove()
        for held in (self.masters, self.moved, self.optimizer.state, self.optimizer.param_groups):
            held.clear()
        dtype = self.model.dtype  # the result must not hold the model
        return UpdatedWeights(trained, products, dtype)

    def _merge_adapters(self) -> dict[str, Callable[[], Tensor]]:
        """Add to each weight what its adapter adds; return what computes that, by the weight's name
        on disk.

        Products are computed again when needed: all of them together take twice the memory of the
        model.
        """
        products = dict[str, Callable[[], Tensor]]()
        for name, module in self.model.named_modules():
            key = f"{name}.lora_{{}}.{ADAPTER}.weight"
            if key.format("A") in self.masters:
                up, down = (self.masters[key.format(side)].detach() for side in "BA")
                product = partial(_product, up, down, module.scaling[ADAPTER])
                weight = module.get_base_layer().weight
                weight.copy_(weight.float() + _shard_as(weight, product()))
                (stored,) = revert_weight_conversion(self.model, {f"{name}.weight": weight.detach()})
                # the weight has now what the adapter added
                products[stored], module.scaling[ADAPTER] = product, 0.0
        return products


class UpdatedWeights:
    """Returns the updated value of each stored weight after training."""

    def __init__(
        self, trained: dict[str, Tensor], products: dict[str, Callable[[], Tensor]], dtype: torch.dtype
    ) -> None:
        """trained, products: weights, and what adapters add to weights, by names on disk. dtype: of
        the model."""
        self.trained, self.products, self.dtype = trained, products, dtype
        self.pending = {*trained, *products}
        """Trained weights that have not been asked for."""

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """Return the updated value of a stored weight, in float32 if it was trained."""
        self.pending.discard(name)
        if product := self.products.get(name):
            return weight.float() + product().to(weight.device)
        if (change := self.trained.get(name)) is None:
            return weight
        change = change.to(weight.device)
        if weight.dtype == self.dtype:
            return change.float()
        # keep the precision that was dropped when the weight was loaded in a lower dtype
        return weight.float() - weight.to(self.dtype).float() + change

    def check_complete(self) -> None:
        """Refuse to write a model without a weight that was trained. Raises: TrainingError."""
        if self.pending:
            raise TrainingError(
                f"{min(self.pending)} was trained but is not on disk ({len(self.pending)} weights in all); prune with "
                "--train masks"
            )


def obstacle_to_8_bits(accelerator: Accelerator) -> str:
    """Return why `adamw-8bit` cannot run in a process, with the remedy; "" if it can run in all of
    them.

    torchao compiles its step, which requires a compiler, so a step of a small weight is tried. All
    processes must call this together.
    """
    reasons: list[str] = gather_object([_own_obstacle(accelerator.device)])
    return next(filter(None, reasons), "")


@functools.cache
def _own_obstacle(device: torch.device) -> str:
    if not find_spec("torchao"):
        return "adamw-8bit requires torchao; install it with: pip install torchao"
    weight = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16, device=device))
    weight.grad = torch.zeros_like(weight)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _adamw_8bit([weight]).step()
    except Exception as error:  # of torch.compile, the compiler, the linker or the file system
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        return (
            f"adamw-8bit compiles its step, which fails here ({reason}); install a C++ compiler such as g++, and the "
            "headers of Python"
        )
    return ""


def _adamw_8bit(weights: list[nn.Parameter]) -> Any:
    from torchao.optim import AdamW8bit

    return AdamW8bit(weights, betas=BETAS, weight_decay=0.0, bf16_stochastic_round=True)


def rate_of(step: int, num_steps: int, highest: float, warmup: float, flat_until: int = 0) -> float:
    """Return AdamW's learning rate in a step: a linear warm-up, then a cosine decay to 0.

    warmup: share of the steps.
    flat_until: the step at which the decay begins, if that is later than the end of the warm-up. If
        it is the last step, as in a size family without polish, the rate never decays.
    """
    rising = warmup * num_steps
    if step < rising:
        return highest * (step + 1) / (rising + 1)
    falling = max(rising, flat_until)
    return highest * 0.5 * (1.0 + math.cos(math.pi * max(0.0, step - falling) / max(1.0, num_steps - falling)))


def step_seed(seed: int, step: int) -> int:
    """Return the seed of stochastic rounding in a step of a run with this seed."""
    return (seed << 24) + step


def _add_adapters(model: Any, rank: int) -> None:
    """Add peft's low-rank adapters to every linear module of the decoder layers, in the dtype of
    the weights.

    peft gets the list of layers and not the model: for the `model_type` of a mixture of experts it
    would replace some of the modules by the stacked weights of the experts.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = decoder_layers(model)[1]
    names = {name for name, module in layers.named_modules() if isinstance(module, nn.Linear)}
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=sorted(names))
    inject_adapter_in_model(config, layers, adapter_name=ADAPTER)
    adapted = {name for name, module in layers.named_modules() if hasattr(module, "lora_A")}
    assert adapted == names, f"peft adapts other modules than it was told: {adapted ^ names}"


def _product(up: Tensor, down: Tensor, scale: float) -> Tensor:
    """Return what an adapter adds to its weight."""
    return up @ down * scale


def _shard_as(pattern: Tensor, unsharded: Tensor) -> Tensor:
    """Return `unsharded`, which every process has, sharded as `pattern` is, if it is."""
    if not isinstance(pattern, DTensor):
        return unsharded
    return distribute_tensor(unsharded, pattern.device_mesh, pattern.placements, src_data_rank=None)
