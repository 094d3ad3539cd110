"""What fits into the memory of a device: activations, micro-batches, weights that are trained.

Frozen linear layers keep nothing between forward and backward; norms, attention, activation
functions and gates do. A checkpointed layer keeps only its input, and runs forward again in
backward. All sizes are bytes.
"""

import ctypes
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import get_max_memory
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ddp_training.decoder import decoder_layers, num_chosen_experts
from ddp_training.loss import head_bytes
from ddp_training.processes import local_part
from ddp_vllm.errors import TrainingError
from ddp_vllm.families import Dimensions

FROZEN = ("model.embed_tokens.", "lm_head.")  # weights that are never trained
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container, as seen from inside
USABLE = 0.8  # of free memory: the needs of a step are estimates, and memory fragments
ACTIVATION_SHARE = 0.5  # of free memory for activations; if they need more, layers are checkpointed
TRAINING_SHARE = 0.7  # of free memory for weights and their training; the rest is for activations
EAGER_TOKENS = 512  # longest sequence for which eager attention is faster than SDPA on a CPU


def pending_state(optimizer: str, itemsize: int) -> int:
    """Return the bytes per trained weight that exist only after the first step: the sum of
    gradients, two moments.

    optimizer: `adamw`, whose sums and moments are float32; `adamw-8bit`, whose sums have the dtype
        of the weights and whose moments have 8 bits; or "" if no weight is trained. itemsize: bytes
        of a weight.
    """
    return {"": 0, "adamw": 12, "adamw-8bit": itemsize + 2}[optimizer]


def state_bytes(optimizer: str, itemsize: int) -> int:
    """Return the bytes that training adds to a weight: as `pending_state`, and the float32 master
    of a 16-bit weight.

    A float32 weight is its own master, and `adamw-8bit` has none.
    """
    return pending_state(optimizer, itemsize) + (4 if optimizer == "adamw" and itemsize < 4 else 0)


class SizedModel(Protocol):
    """A model, and the dimensions of it or of the dense model it was cut from."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def sizes(self) -> Dimensions: ...


def fit_activations(
    sized: SizedModel, setting: str, num_sequences: int, seq_len: int, accelerator: Accelerator, optimizer: str,
    *, held: float = 0.0, is_fixed: bool = False,
) -> int:  # fmt: skip
    """Choose attention and checkpointing, and return how many sequences fit into a forward and
    backward pass.

    setting: checkpoint layers `on` or `off`; `auto` checkpoints if the activations of
        `num_sequences` need more than ACTIVATION_SHARE of the free memory, and those of half of
        them too: two smaller passes take less time than one that computes every layer again.
    is_fixed: the number of sequences is the user's.
    optimizer: of trained weights, if there are any.
    held: bytes that are still free, but not for the pass.
    The number of sequences is halved until a pass fits, down to 1, which may still not fit. All
    processes choose alike.
    """
    fit_attention(sized.model, seq_len, accelerator.device)
    free = memory_for_passes(sized, accelerator, optimizer) - held
    if setting == "auto":
        needed = seq_len * activation_bytes(sized, seq_len)  # of one sequence
        tried = [num_sequences] if is_fixed else [num_sequences, num_sequences // 2]
        fitting = next((number for number in tried if 0 < number * needed <= ACTIVATION_SHARE * free), 0)
        setting, num_sequences = ("off", fitting) if fitting else ("on", num_sequences)
    checkpoint_layers(sized.model, setting == "on")
    while num_sequences > 1 and pass_bytes(sized, num_sequences, seq_len, accelerator.device) > USABLE * free:
        num_sequences //= 2
    return num_sequences


def fit_attention(model: Any, seq_len: int, device: torch.device) -> None:
    """Use eager attention for short bfloat16 sequences on a CPU, where SDPA's backward is slow.

    Models whose keys have a bias, such as Qwen2, keep SDPA: their large products lose too much
    precision in bfloat16.
    """
    short = device.type == "cpu" and model.dtype == torch.bfloat16 and seq_len <= EAGER_TOKENS
    biased = any("k_proj" in name and name.endswith("bias") for name, _ in model.named_parameters())
    if short and not biased and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def checkpoint_layers(model: torch.nn.Module, checkpointed: bool) -> None:
    """Switch checkpointing of the decoder layers on or off.

    transformers checkpoints layers in training mode only. The modules inside stay in eval mode, so
    dropout stays off. Reentrant checkpointing would lose gradients, because the gates are not
    arguments of the layers.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = layer.training = checkpointed
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def fits_with_pass(
    num_bytes: int, sized: SizedModel, num_sequences: int, seq_len: int, accelerator: Accelerator, optimizer: str
) -> bool:
    """Tell whether `num_bytes` fit into free memory next to a forward and backward pass."""
    free = memory_for_passes(sized, accelerator, optimizer)
    return num_bytes + pass_bytes(sized, num_sequences, seq_len, accelerator.device) <= USABLE * free


def memory_for_passes(sized: SizedModel, accelerator: Accelerator, optimizer: str) -> int:
    """Return the free bytes less those that training still allocates, of the process with the
    least.

    All processes must call this together, and choose alike by the result: sharded rows differ in
    number.
    """
    return _least(free_memory(accelerator) - pending_bytes(sized.model, optimizer), accelerator)


def model_bytes(shapes: Mapping[str, Sequence[int]], itemsize: int, optimizer: str, *, teacher: bool) -> int:
    """Return the bytes of a model, of its teacher, and of everything that training its weights
    keeps.

    shapes: of all weights, by their names on disk. optimizer: as of `pending_state`.
    teacher: a second copy of the weights; both share the embeddings and the output head, which are
        not trained.
    """
    frozen = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(FROZEN))
    trained = sum(map(math.prod, shapes.values())) - frozen
    return itemsize * frozen + trained * (itemsize * (1 + teacher) + state_bytes(optimizer, itemsize))


def adapter_bytes(shapes: Mapping[str, Sequence[int]], itemsize: int, rank: int) -> int:
    """Return the bytes that training low-rank adapters adds to a model. shapes: as above. Experts
    get no adapters."""
    others = (*FROZEN, ".experts.")
    adapted = [shape for name, shape in shapes.items() if len(shape) == 2 and not any(part in name for part in others)]
    return rank * sum(map(sum, adapted)) * (itemsize + state_bytes("adamw", itemsize))


def fits(num_bytes: float, accelerator: Accelerator, share: float | None = None) -> bool:
    """Tell whether a share of the free memory of every process, by default TRAINING_SHARE, holds so
    many bytes."""
    enough = num_bytes <= (share or TRAINING_SHARE) * free_memory(accelerator)
    return bool(accelerator.gather(torch.tensor([enough], device=accelerator.device)).all())


def gigabytes(number: float) -> str:
    """Write bytes for people, in powers of 1,000."""
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"


def pass_bytes(sized: SizedModel, num_sequences: int, seq_len: int, device: torch.device) -> int:
    """Estimate the bytes of a forward and backward pass on top of the weights, with layers
    checkpointed as they are.

    device: of the run; the model itself may have no weights.
    """
    num_tokens, num_layers = num_sequences * seq_len, sized.sizes.num_layers
    kept = num_tokens * activation_bytes(sized, seq_len)
    if any(getattr(layer, "gradient_checkpointing", False) for layer in sized.model.modules()):
        itemsize = next(sized.model.parameters()).dtype.itemsize
        kept = num_tokens * num_layers * sized.sizes.hidden_size * itemsize + kept // num_layers
    return kept + num_tokens * gate_bytes(sized) + head_bytes(sized.model, device)


def pending_bytes(model: torch.nn.Module, optimizer: str) -> int:
    """Return the bytes that this process allocates after training starts, apart from those of a
    pass.

    Per trained weight: the sum of its gradients and two moments, which exist from the end of the
    first step; the gradient itself is freed as soon as backward has it. Per sharded model: two
    gathered layers, the one in use and the next, and the gradient of one layer in its own dtype and
    in float32, in which it is summed over processes.
    """
    parameters = list(model.parameters())
    trained = sum(
        pending_state(optimizer, parameter.dtype.itemsize) * local_part(parameter).numel()
        for parameter in parameters
        if parameter.requires_grad
    )
    itemsize, largest = parameters[0].dtype.itemsize, 0
    for layer in decoder_layers(model)[1]:
        sharded = [parameter for parameter in layer.parameters() if isinstance(parameter, DTensor)]
        gathered = 2 * itemsize * sum(parameter.numel() for parameter in sharded)
        reduced = (itemsize + 4) * sum(parameter.numel() for parameter in sharded if parameter.requires_grad)
        largest = max(largest, gathered + reduced)
    return trained + largest


def gate_bytes(sized: SizedModel) -> int:
    """Return the bytes per token of the widest gate's backward, on top of the activations.

    These are the incoming gradient, its product with the input in float32, and the squares or a
    copy of that product.
    """
    sizes, itemsize = sized.sizes, next(sized.model.parameters()).dtype.itemsize
    slots = num_chosen_experts(sized.model.config) if sizes.num_experts else 0
    channels = sizes.intermediate_size if len(sizes.routed_layers) < sizes.num_layers else 0
    return (4 + 4 + itemsize) * max(channels, slots * sizes.expert_intermediate_size)


def activation_bytes(sized: SizedModel, seq_len: int) -> int:
    """Estimate the bytes per token that all layers keep for backward without checkpointing.

    Norms: a layer keeps the inputs of two norms in float32; with trained weights, their outputs
        too.
    Attention: queries, keys, values and the output; SDPA keeps its output once more, eager
        attention keeps its weights for all tokens of the sequence, in float32 and in the model's
        dtype.
    MLP: four rows of channels: before and after the activation function, the other factor and the
    gated product. Routed experts: 4·C + H numbers per slot (`experts.py`).
    """
    sizes, itemsize = sized.sizes, next(sized.model.parameters()).dtype.itemsize
    queries, keys = sizes.num_query_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    attention = (2 * queries + 2 * keys) * itemsize
    if sized.model.config._attn_implementation == "eager":  # type: ignore[union-attr]
        attention += (4 if itemsize == 4 else 4 + itemsize) * sizes.num_query_heads * seq_len
    else:
        attention += queries * itemsize
    routed = len(sizes.routed_layers)
    slots = num_chosen_experts(sized.model.config) if sizes.num_experts else 0
    channels = (sizes.num_layers - routed) * 4 * sizes.intermediate_size
    experts = routed * slots * (4 * sizes.expert_intermediate_size + sizes.hidden_size)
    trained = any(parameter.requires_grad for parameter in sized.model.parameters())
    norms = (8 + 2 * itemsize * trained) * sizes.hidden_size
    return sizes.num_layers * (norms + attention) + itemsize * (channels + experts)


@contextmanager
def explained(message: str) -> Iterator[None]:
    """Turn a lack of memory in the block, outside of a step, into an error of the user.
    Raises: TrainingError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(message) from error


def free_memory(accelerator: Accelerator) -> int:
    """Return the free bytes per process, of the process with the least. All processes must call
    this together."""
    if (device := accelerator.device).type == "cuda":
        # torch reuses it
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    else:
        memory = get_max_memory()
        host = int(memory.get("cpu", memory.get("mps", 0)))  # a Mac's memory is listed once
        free = min(host, _container_memory(host)) // accelerator.num_processes
    return _least(free, accelerator)


def _least(number: int, accelerator: Accelerator) -> int:
    return int(accelerator.gather(torch.tensor([number], device=accelerator.device)).min())


def _container_memory(otherwise: int) -> int:
    """Return the bytes that a container (Linux control groups, version 2) may still use; psutil
    sees only the host.

    The page cache counts as free, because the kernel reclaims it. Outside a container this is
    `otherwise`.
    """
    try:
        limit, used = ((CONTROL_GROUP / name).read_text(encoding="utf-8") for name in ("memory.max", "memory.current"))
        statistics = (CONTROL_GROUP / "memory.stat").read_text(encoding="utf-8")
        if limit.strip() == "max":
            return otherwise
        cached = dict(line.split() for line in statistics.splitlines())["inactive_file"]
        return max(0, int(limit) - int(used) + int(cached))
    except (OSError, KeyError, ValueError):
        return otherwise


def reset_peak(device: torch.device) -> float:
    """Start measuring `peak_bytes`; return the bytes in use, or NaN on a CPU without Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that loading has freed
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return math.nan
    return _resident("VmRSS")


def peak_bytes(device: torch.device) -> float:
    """Return the most bytes since `reset_peak`: of the GPU's allocator, or the whole process's
    resident memory."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(field: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.nan
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
