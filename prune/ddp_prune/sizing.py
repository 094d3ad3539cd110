"""Estimates for other machines: the memory of a training step, and the hours for its tokens.

Memory is found by running the real step of the model at its real size on fake tensors, which have shapes but no data.
This requires neither weights nor a GPU. Hours are an estimate: counted FLOPs at an assumed utilization.
"""

import dataclasses
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_models.loading import shard_layers, share_frozen_weights
from ddp_prune.gates import GatedModel
from ddp_prune.mode import MODES, Mode
from ddp_training.loss import CHUNK_BYTES, GPU_CHUNK_BYTES, OutputHead, distill, final_hidden
from ddp_training.memory import FROZEN, SizedModel, adapter_bytes, checkpoint_layers, gigabytes, model_bytes, pass_bytes
from ddp_training.weights import MOMENTS, RANK, TrainedWeights
from ddp_vllm.errors import SettingError
from ddp_vllm.families import dimensions_of, family_of
from ddp_vllm.remote_code.widths import count_experts

UTILIZATION = 0.4  # of the bfloat16 peak; assumed, not measured
SMALL = (2, 4)  # numbers of layers that are run; memory is linear in the number of equal layers
SEQUENCES = (4, 2, 1)  # per forward pass and device: about 8,192 tokens, and fewer where they do not fit


@dataclass(frozen=True)
class Card:
    """A GPU: usable bytes of memory, and dense bfloat16 FLOPs per second by its data sheet."""

    memory: float
    flops: float


CARDS = {
    "rtx4090-24gb": Card(23.5 * 2**30, 165e12),
    "a100-80gb": Card(79.1 * 2**30, 312e12),
    "h100-80gb": Card(79.1 * 2**30, 989e12),
    "h200-141gb": Card(139.8 * 2**30, 989e12),
}


def parse_cards(text: str) -> tuple[str, int]:
    """Read `h100-80gb` or `2xh100-80gb`: the name of a card, and how many. Raises: SettingError."""
    count, _, name = text.partition("x") if text[:1].isdigit() else ("1", "", text)
    if name not in CARDS or not count.isdigit() or not 1 <= int(count) <= 64:
        raise SettingError(f"on is {text!r}; give a card, or several as 2xh100-80gb; known: {', '.join(CARDS)}")
    return name, int(count)


def describe(config: Mapping[str, Any], cards: str, *, seq_len: int, tokens: int, distillation: bool) -> Iterator[str]:
    """Yield a line per training mode: whether it fits on these cards, its peak memory, and the hours for `tokens`.

    config: of the dense model. Several cards share the weights (`--shard`). Raises: SettingError.
    """
    name, count = parse_cards(cards)
    for mode in reversed(MODES):
        for num_sequences in SEQUENCES:
            peak = step_bytes(config, mode, num_sequences, seq_len, count, distillation=distillation)
            if peak <= CARDS[name].memory:
                break
        verdict = "fits" if peak <= CARDS[name].memory else "does not fit"
        hours = training_hours(config, mode, tokens, CARDS[name], count, distillation=distillation)
        spent = f"{hours:.2g}" if hours < 10 else f"{hours:.0f}"
        yield (
            f"{mode} on {cards}: {verdict}, {gigabytes(peak)} of {gigabytes(CARDS[name].memory)} per card with "
            f"{num_sequences} × {seq_len:,} tokens per pass; about {spent} hours for {tokens / 1e6:,.1f} M tokens"
        )


def training_hours(
    config: Mapping[str, Any], mode: Mode, tokens: int, card: Card, num_cards: int, *, distillation: bool
) -> float:
    """Estimate the hours of training, with checkpointed layers: 2 FLOPs per active parameter and token and pass.

    Passes: the teacher's forward, forward, forward again, gradients of activations, and gradients of trained weights.
    """
    passes = distillation + 3 + (mode.train == "weights")
    return 2.0 * active_parameters(config) * passes * tokens / (UTILIZATION * card.flops * num_cards) / 3600.0


def active_parameters(config: Mapping[str, Any]) -> int:
    """Return the parameters that a token is multiplied with, the output head included."""
    with FakeTensorMode():
        model = _build(config, int(config["num_hidden_layers"]))
        experts = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
        total = sum(each.numel() for each in model.parameters()) - model.get_input_embeddings().weight.numel()
        if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
            total += model.get_input_embeddings().weight.numel()
    return int(total - experts * (1 - (config.get("num_experts_per_tok") or 1) / (count_experts(config) or 1)))


def step_bytes(
    config: Mapping[str, Any], mode: Mode, num_sequences: int, seq_len: int, num_devices: int, *, distillation: bool
) -> int:
    """Return the peak bytes per device of a training step in bfloat16 with checkpointed layers, on a GPU.

    A dense model runs with few layers; the rest follows, because layers are equal. Several devices share the weights.
    """
    sizes = num_sequences, seq_len, num_devices
    if mode.train == "lora":  # peft does not take fake tensors: adapters, and the inputs of a layer's projections
        with FakeTensorMode():
            shapes = {n: list(p.shape) for n, p in _build(config, int(config["num_hidden_layers"])).named_parameters()}
        added = adapter_bytes(shapes, 2, RANK) + num_sequences * seq_len * 4 * int(config["hidden_size"])
        return added + step_bytes(config, Mode("masks", ""), *sizes, distillation=distillation)
    if dimensions_of(config).num_experts:
        return _estimate(config, mode, *sizes, distillation=distillation)
    few, more = (simulate(config, number, mode, *sizes, distillation=distillation) for number in SMALL)
    layers = int(config["num_hidden_layers"])
    return few + (more - few) * (layers - SMALL[0]) // (SMALL[1] - SMALL[0])


def _estimate(
    config: Mapping[str, Any], mode: Mode, num_sequences: int, seq_len: int, num_devices: int, *, distillation: bool
) -> int:
    """Return by formula what a step of a mixture of experts takes; its routing depends on data, which is not there."""
    with FakeTensorMode():
        model = _build(config, int(config["num_hidden_layers"]))
        model.requires_grad_(bool(mode.optimizer))
        checkpoint_layers(model, True)
        shapes = {name: list(each.shape) for name, each in model.named_parameters()}
        teacher = bool(mode.optimizer) and distillation
        whole = model_bytes(shapes, 2, mode.optimizer, teacher=teacher)
        frozen = 2 * sum(math.prod(each) for name, each in shapes.items() if name.startswith(FROZEN))
        layer = (whole - frozen) // int(config["num_hidden_layers"])
        held = frozen + (whole - frozen) // num_devices + 2 * layer * (num_devices > 1)
        sized = SimpleNamespace(model=model, sizes=dimensions_of(config))
        # formulas take the head of a CPU, which has smaller chunks: logits, probabilities of both models, and a copy
        head = 5 * (GPU_CHUNK_BYTES - CHUNK_BYTES)
        return held + head + pass_bytes(cast(SizedModel, sized), num_sequences, seq_len)


def simulate(
    config: Mapping[str, Any], num_layers: int, mode: Mode, num_sequences: int, seq_len: int, num_devices: int,
    *, distillation: bool, chunk_bytes: int = GPU_CHUNK_BYTES,
) -> int:  # fmt: skip
    """Return the peak bytes of one process in two training steps of a model with this number of layers.

    chunk_bytes: logits that exist at once; a CPU has fewer than a GPU.
    """
    accelerator = SimpleNamespace(num_processes=num_devices, device=torch.device("cpu"), is_main_process=True)
    with _mesh(num_devices) as mesh, FakeTensorMode(), LiveBytes() as live:
        model = _build(config, num_layers)
        if mesh:
            shard_layers(model, mesh, torch.bfloat16)
        own = dict(config, num_hidden_layers=num_layers)
        gated = GatedModel(model, family_of(own), dimensions_of(own), "kv-group")
        weights, teacher = None, model
        if mode.optimizer:
            weights = TrainedWeights(model, cast(Accelerator, accelerator), optimizer=mode.optimizer)
            if distillation:
                teacher = _build(config, num_layers)
                share_frozen_weights(teacher, model)
                if mesh:
                    shard_layers(teacher, mesh, torch.bfloat16)
        checkpoint_layers(model, True)
        live.peak = live.now
        moments = list[torch.Tensor]()
        for _ in range(2):
            _backward(gated, teacher, torch.zeros(num_sequences, seq_len, dtype=torch.int64), distillation, chunk_bytes)
            if weights and mode.optimizer == "adamw-8bit":  # its own step reads data, and takes no memory but this
                moments = moments or [
                    torch.zeros_like(m, dtype=torch.uint8) for m in weights.moved.values() for _ in MOMENTS
                ]
                weights.sums.clear()
            elif weights:
                weights.move(1e-5, 0.5)
        return live.peak


def _backward(gated: GatedModel, teacher: Any, tokens: torch.Tensor, distillation: bool, chunk_bytes: int) -> None:
    """Do the forward and backward pass of a step, as `Trainer` does."""
    model: Any = gated.model
    leaves = {kind: torch.ones(shape).requires_grad_() for kind, shape in gated.shapes.items()}
    squares = {kind: torch.zeros(shape) for kind, shape in gated.shapes.items()}
    with torch.no_grad():
        states = final_hidden(teacher, tokens) if distillation else None
    with gated.masks(leaves, squares):
        student, head = final_hidden(model, tokens), dataclasses.replace(OutputHead.of(model), chunk_bytes=chunk_bytes)
        distill(student, states, head, tokens[:, 1:].reshape(-1), 2.0)[0].backward()


def _build(config: Mapping[str, Any], num_layers: int) -> Any:
    """Return a frozen bfloat16 model of this size on fake tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: value for name, value in config.items() if name not in ("layer_types", "dtype", "torch_dtype")}
    own = AutoConfig.for_model(**values | {"num_hidden_layers": num_layers})
    model = AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16, trust_remote_code=False)
    model.requires_grad_(False)
    return model.eval()


@contextmanager
def _mesh(number: int) -> Iterator[DeviceMesh | None]:
    """Pretend to be one of several processes, whose collectives return at once; yield None for a single one."""
    if number == 1:
        yield None
        return
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield init_device_mesh("cpu", (number,))
    finally:
        distributed.destroy_process_group()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that exist after every operation, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.storages: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def now(self) -> int:
        """Bytes that exist now; FSDP frees a layer by resizing its storage to 0."""
        return sum(storage.nbytes() for storage in self.storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.storages.add((tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage())
        self.peak = max(self.peak, self.now)
        return result
