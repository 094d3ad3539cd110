"""Devices: how a run fits the memory of one, and how several processes learn as one.

Frozen linear layers keep nothing between forward and backward; norms, attention, activation functions and gates do.
With checkpointing a layer keeps its input alone, and runs forward again. Processes may be started by accelerate launch
or by torchrun. With `shard`, FSDP2 cuts frozen weights over them: a decoder layer is gathered just before it is used.
What is outside the layers stays whole on every device, since the output head is used all the time (`loss.py`).
accelerate's own FSDP2 plugin would cut it too, and refuses CPUs.
"""

import ctypes
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast_object_list, gather_object, get_max_memory
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ddp_prune.gates import GatedModel, NarrowLayers
from ddp_prune.loss import head_bytes
from ddp_prune.model import Source, check_complete, load_model, loading_options, weight_files
from ddp_prune.recipe import Recipe, RecoveryRecipe
from ddp_prune.run_state import RunState
from ddp_prune.weights import LEARNED, local_part
from ddp_vllm.errors import DdpError, SettingError
from ddp_vllm.families import Dimensions
from ddp_vllm.remote_code.tensors import LAYERS

Found = TypeVar("Found")
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container, as seen from inside
USABLE = 0.8  # of free memory: what a step takes is an estimate, and memory breaks into pieces
SHARE_OF_FREE = 0.5  # of free memory for activations, else they are checkpointed
LEARNING_BYTES = 18  # beside a 16-bit weight that learns: its gradient, a float32 master and its gradient, two moments
LEARNING_SHARE = 0.7  # of free memory, for these; the rest is for activations
EAGER_TOKENS = 512  # a sequence, up to which attention's weights are written down on a CPU


def make_accelerator(output: Path, tracker: str | None) -> Accelerator:
    """Return what tells a process its device and its part in the run.

    Raises: SettingError if the tracker is not installed.
    """
    trackers = [str(name) for name in get_available_trackers()]
    if tracker and tracker not in trackers:
        known = ", ".join(trackers) or "none; for example pip install tensorboard"
        raise SettingError(f"tracker is {tracker!r}, which is unknown or not installed; installed: {known}")
    # not told that it is a CPU's, accelerate takes a process that torchrun started for the only one
    device = torch.accelerator.current_accelerator(check_available=True)
    on_cpu = device is None or device.type == "mps"  # a Mac's GPU has no float64, in which gradients are summed
    # other ranks wait while the first downloads and tokenises; torch would give up after ten minutes
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=6))
    return Accelerator(cpu=on_cpu, log_with=tracker, project_dir=str(output.parent), kwargs_handlers=[patience])


class SizedModel(Protocol):
    """A model, and the sizes of it or of the dense model it was cut from."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def sizes(self) -> Dimensions: ...


def fit_activations(gated: SizedModel, setting: str, num_sequences: int, seq_len: int, accelerator: Accelerator) -> int:
    """Choose how attention is computed, switch checkpointing `on` or `off`, and return how many sequences fit.

    `auto` asks whether half of free memory holds what `num_sequences` of `seq_len` tokens keep. They are halved until
    a pass fits, down to one, which may still not fit. All processes choose the same, as those that share weights must.
    """
    fit_attention(gated.model, seq_len, accelerator.device)
    free = free_memory(accelerator) - bytes_to_come(gated.model)
    if setting == "auto":
        needed = num_sequences * seq_len * activation_bytes(gated, seq_len)
        setting = "on" if needed > SHARE_OF_FREE * free else "off"
    checkpoint_layers(gated.model, setting == "on")
    while num_sequences > 1 and pass_bytes(gated, num_sequences, seq_len) > USABLE * free:
        num_sequences //= 2
    return num_sequences


def fit_attention(model: Any, seq_len: int, device: torch.device) -> None:
    """Let short sequences in bfloat16 on a CPU write attention's weights down: its fused kernel is slow backward there.

    Not where keys have a bias, as Qwen2's: their large products lose too much in bfloat16 (log 48).
    """
    short = device.type == "cpu" and model.dtype == torch.bfloat16 and seq_len <= EAGER_TOKENS
    biased = any(name.endswith("k_proj.bias") for name, _ in model.named_parameters())
    if short and not biased and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def checkpoint_layers(model: torch.nn.Module, wanted: bool) -> None:
    """Switch checkpointing of the decoder layers on or off.

    transformers checkpoints layers in training mode only; the modules inside stay in eval mode, so nothing drops out.
    The reentrant kind would lose gradients: the gates are no arguments of the layers.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = layer.training = wanted
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def pass_bytes(gated: SizedModel, num_sequences: int, seq_len: int) -> int:
    """Return about how many bytes a pass forward and backward takes beside the weights, layers as they now are."""
    num_tokens, num_layers = num_sequences * seq_len, gated.sizes.num_layers
    kept = num_tokens * activation_bytes(gated, seq_len)
    if any(getattr(layer, "gradient_checkpointing", False) for layer in gated.model.modules()):
        itemsize = next(gated.model.parameters()).dtype.itemsize
        kept = num_tokens * num_layers * gated.sizes.hidden_size * itemsize + kept // num_layers
    return kept + num_tokens * gate_bytes(gated) + head_bytes(gated.model)


def bytes_to_come(model: torch.nn.Module) -> int:
    """Return the bytes that this process allocates after training starts, apart from those of a pass.

    Per weight that learns: its gradient, the float32 sum of gradients and two float32 moments, which exist from the
    end of the first step on. Per model cut over processes: two layers gathered at once, the one in use and the next,
    and the gradient of one layer in its own format and in float32, in which it is summed over processes.
    """
    parameters = list(model.parameters())
    learning = sum(
        local_part(each).numel() * (each.dtype.itemsize + 3 * 4) for each in parameters if each.requires_grad
    )
    itemsize, largest = parameters[0].dtype.itemsize, 0
    for layer in model.get_submodule(LAYERS).children():
        cut = [each for each in layer.parameters() if isinstance(each, DTensor)]
        gathered = 2 * itemsize * sum(each.numel() for each in cut)
        reduced = (itemsize + 4) * sum(each.numel() for each in cut if each.requires_grad)
        largest = max(largest, gathered + reduced)
    return learning + largest


def gate_bytes(gated: SizedModel) -> int:
    """Return how many bytes a token takes in the backward pass of the widest gate, beside what is kept.

    The gradient that arrives, its product with the input in float32, and the squares of those or the copy they are of.
    """
    sizes, itemsize = gated.sizes, next(gated.model.parameters()).dtype.itemsize
    slots: Any = getattr(gated.model.config, "num_experts_per_tok", 0)
    channels = sizes.intermediate_size if len(sizes.routed_layers) < sizes.num_layers else 0
    return (4 + 4 + itemsize) * max(channels, slots * sizes.expert_intermediate_size)


def activation_bytes(gated: SizedModel, seq_len: int) -> int:
    """Return about how many bytes a token keeps for backward in all layers, without checkpointing.

    A layer keeps two norms' inputs in float32, queries, keys, values and the output of attention, and four rows of MLP
    channels (before and after the activation function, the other factor, and the product that is gated). Routed
    experts keep 4·C + H a slot (`experts.py`); kernels that copy keep a little more. Fused attention keeps its output
    once more; else its weights are kept, for all tokens of a sequence: in float32 and, if that is another, in the
    model's format. Weights that learn keep their inputs, which are the outputs of the two norms.
    """
    sizes, itemsize = gated.sizes, next(gated.model.parameters()).dtype.itemsize
    queries, keys = sizes.num_query_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    attention = (2 * queries + 2 * keys) * itemsize
    if gated.model.config._attn_implementation == "eager":  # type: ignore[union-attr]
        attention += (4 if itemsize == 4 else 4 + itemsize) * sizes.num_query_heads * seq_len
    else:
        attention += queries * itemsize
    routed = len(sizes.routed_layers)
    slots: Any = getattr(gated.model.config, "num_experts_per_tok", 0)
    channels = (sizes.num_layers - routed) * 4 * sizes.intermediate_size
    experts = routed * slots * (4 * sizes.expert_intermediate_size + sizes.hidden_size)
    learns = any(each.requires_grad for each in gated.model.parameters())
    norms = (8 + 2 * itemsize * learns) * sizes.hidden_size
    return sizes.num_layers * (norms + attention) + itemsize * (channels + experts)


def narrow_layers(gated: GatedModel, accelerator: Accelerator, num_sequences: int, seq_len: int) -> NarrowLayers | None:
    """Return narrow layers if memory holds their copies beside what a pass takes, and no process holds only a part.

    A run that goes on where there is less room computes what is closed too: its sums round differently.
    """
    if gated.sizes.num_experts:
        return None
    narrow = NarrowLayers(gated)
    copies, needed = narrow.copied_bytes(), pass_bytes(gated, num_sequences, seq_len)
    free = free_memory(accelerator) - bytes_to_come(gated.model)
    fits = copies is not None and copies + needed <= USABLE * free
    return narrow if fits else None


def fits_learning(num_weights: int, accelerator: Accelerator, bytes_each: int = LEARNING_BYTES) -> bool:
    """Return whether the memory of every process holds what that many weights need to learn."""
    fits = bytes_each * num_weights <= LEARNING_SHARE * free_memory(accelerator)
    return bool(accelerator.gather(torch.tensor([fits], device=accelerator.device)).all())


@contextmanager
def failing_together(accelerator: Accelerator) -> Iterator[None]:
    """Wait for all processes after the block, and raise in each the DdpError that any of them met there.

    Without it the others would wait for the failed one in their next exchange. The block itself must not wait for
    other processes. Any other exception ends its process at once, and what launched them ends the rest.
    """
    own: DdpError | None = None
    try:
        yield
    except DdpError as error:
        own = error
    met: list[DdpError | None] = gather_object([own])
    if first := own or next(filter(None, met), None):
        raise first


def in_turn(accelerator: Accelerator, find: Callable[[], Found]) -> Found:
    """Return what each process finds; the first of a machine goes before its others, which find what it downloaded.

    What any of them raises, all raise, as in `failing_together`.
    """
    for first in (True, False):
        with failing_together(accelerator):
            if accelerator.is_local_main_process == first:
                found = find()
    return found


def load_run(run: RunState, accelerator: Accelerator) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]] | None:
    """Return what the main process finds of an interrupted run; the others may not see its disk.

    They do not get the tensors of weights that learn, which `LearningWeights.restore` sends one by one. In the main
    process all tensors are views of the mapped file, so those that are not read yet take no memory.
    """
    with failing_together(accelerator):
        saved = run.load() if accelerator.is_main_process else None
    if saved is None or accelerator.num_processes == 1:
        return from_main(accelerator, saved)
    step, tensors, extra = saved
    small = {name: value for name, value in tensors.items() if not name.startswith(LEARNED)}
    from_main(accelerator, (step, small, extra))
    return saved


def from_main(accelerator: Accelerator, value: Found) -> Found:
    """Return what the main process calls this with."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def free_memory(accelerator: Accelerator) -> int:
    """Return the bytes that are free for each process where it computes: those of the process that has the least.

    All processes must call this together. They get the same number, so what they decide by it agrees.
    """
    if (device := accelerator.device).type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, which reuses it
        free = torch.cuda.mem_get_info(device)[0] + cached
    else:
        memory = get_max_memory()
        host = int(memory.get("cpu", memory.get("mps", 0)))  # a Mac's is counted once
        free = min(host, _container_memory(host)) // accelerator.num_processes
    return int(accelerator.gather(torch.tensor([free], device=device)).min())


def forget_peak(device: torch.device) -> float:
    """Forget the peak of memory so far; return the bytes in use, not a number where the system does not say (Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what loading left behind
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return math.nan
    return _resident("VmRSS")


def peak_bytes(device: torch.device) -> float:
    """Return the most memory since `forget_peak`: of a GPU's allocator, else resident, the program's own included."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(field: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.nan
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _container_memory(otherwise: int) -> int:
    """Return the bytes that a container may still take, `otherwise` outside one; psutil sees the host's.

    Version 2 of Linux control groups; what files are only cached, the kernel gives back.
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


def load(source: Source, recipe: Recipe | RecoveryRecipe, accelerator: Accelerator) -> Any:
    """Load a model for a run, whole or cut over all processes."""
    gc.collect()  # models of earlier sizes: FSDP and peft leave reference cycles
    if recipe.shard:
        return load_sharded(source, recipe.dtype, accelerator.device, accelerator.num_processes)
    return load_model(source, recipe.dtype, accelerator.device)


def check_shares(recipe: Recipe | RecoveryRecipe, num_processes: int) -> None:
    """Refuse what would leave processes waiting for others' weights. Raises: SettingError."""
    batch_size = recipe.batch_size
    if not recipe.shard:
        return
    if num_processes == 1:
        raise SettingError(
            "shard cuts the weights over processes, but there is one; start with: "
            "accelerate launch --num_processes N -m ddp_vllm …"
        )
    if batch_size % num_processes:
        raise SettingError(
            f"batch_size is {batch_size}, which {num_processes} processes that share weights cannot divide evenly; "
            f"make it {batch_size + -batch_size % num_processes}"
        )


def load_sharded(source: Source, dtype: str, device: torch.device, num_processes: int) -> Any:
    """Load the stock transformers model, frozen, in eval mode, with its decoder layers cut over all processes.

    It is built without memory; then each process reads from disk the rows that are its own, and never holds more.
    All processes must call this together. Raises: ModelError if the checkpoint lacks weights.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    files = [safe_open(path, framework="pt") for path in weight_files(source.folder)]
    slices = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)
    config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    options = loading_options(source, dtype, device)
    with init_empty_weights(include_buffers=False):  # buffers are small, and computed rather than stored
        model: Any = AutoModelForCausalLM.from_config(config, **options)
    model.requires_grad_(False)
    shard_layers(model, device, num_processes, options["dtype"])
    settings = LoadStateDictConfig(
        device_map={"": device}, dtype=options["dtype"], weight_mapping=get_model_conversion_mapping(model)
    )
    convert_and_load_state_dict_in_model(model, slices, settings)  # reads each DTensor's own rows
    model.tie_weights()
    check_complete(source, [name for name, parameter in model.named_parameters() if parameter.is_meta])
    model.requires_grad_(False)
    return model.eval()


def shard_layers(model: Any, device: torch.device, num_processes: int, dtype: torch.dtype) -> None:
    """Cut every decoder layer over all processes, by rows; what is outside of the layers stays whole.

    Layers are computed in `dtype`, whatever the format of the rows, and gradients are summed in float32.
    """
    mesh = init_device_mesh(device.type, (num_processes,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    cut: set[torch.nn.Parameter] = set()
    for layer in model.get_submodule(LAYERS).children():
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        cut.update(layer.parameters())
    # the decoder owns no weights of its own, but as the root of its layers it lets them gather ahead of each other
    fully_shard(model.get_decoder(), mesh=mesh, ignored_params=set(model.parameters()) - cut)
