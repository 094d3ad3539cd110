"""Fits a run into memory and time: training mode, checkpointing, sequences at once, bytes and hours.

One formula on the shapes of the weights serves a run, `--dry-run` and `--on`; only the devices
differ. Frozen linear layers keep nothing between forward and backward; norms, attention, activation
functions and gates do. A checkpointed layer keeps only its input, and runs forward again in
backward. Hours are counted FLOPs at an assumed utilization.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from ddp_prune.core.batches import usual_sequences
from ddp_prune.core.decoder import auto_class, fit_attention
from ddp_prune.core.loss import head_bytes
from ddp_prune.core.weights import RANK
from ddp_prune.devices import free_memory
from ddp_prune.models.source import AGAIN, Source, loading_options, stock_config
from ddp_prune.recipe import Recipe
from ddp_prune.settings import TrainingSettings, optimizer_suits
from ddp_vllm.costs import whole_model
from ddp_vllm.dimensions import count_chosen_experts
from ddp_vllm.errors import ModelError, SettingError, reading
from ddp_vllm.settings import option_of

FROZEN = ("model.embed_tokens.", "lm_head.")  # weights that are never trained
USABLE = 0.8  # of free memory: the needs of a step are estimates, and memory fragments
ACTIVATION_SHARE = 0.5  # of free memory for activations; if they need more, layers are checkpointed
TRAINING_SHARE = 0.7  # of free memory for weights and their training; the rest is for activations
UTILIZATION = 0.4  # of the peak; assumed, not measured
# of a layer in a forward and backward pass, whatever its size: a CPU takes that long to launch the
# kernels (measured: joint training of SmolLM2, 30 layers, on an H100)
LAUNCH_SECONDS = 8.4e-3
LARGEST_PASS = 4  # times the usual tokens of a pass on a GPU, if activations fit: fewer launches per token
ATTENTION_BACKWARD = 2.5  # products per forward product; flash attention computes the scores again


@dataclass(frozen=True)
class Card:
    """A GPU that a dry run estimates for: usable bytes of memory, and FLOPs per second by its data
    sheet: of dense products in 16 bits, and in float32, for which torch uses no tensor cores."""

    memory: float
    flops: float
    flops_of_float32: float
    bandwidth: float
    """Bytes per second of its memory, by the data sheet."""


CARDS = {
    "rtx4090-24gb": Card(23.5 * 2**30, 165e12, 82.6e12, 1.01e12),
    "a100-80gb": Card(79.1 * 2**30, 312e12, 19.5e12, 2.04e12),
    "h100-80gb": Card(79.1 * 2**30, 989e12, 67e12, 3.35e12),
    "h200-141gb": Card(139.8 * 2**30, 989e12, 67e12, 4.8e12),
}


def parse_cards(text: str) -> tuple[str, int]:
    """Read `h100-80gb` or `2xh100-80gb`: the name of a card, and how many. Raises: SettingError."""
    count, _, name = text.lower().partition("x") if text[:1].isdigit() else ("1", "", text.lower())
    cards = [name] if name in CARDS else [card for card in CARDS if name and card.startswith(name)]
    if len(cards) != 1 or not count.isdigit() or not 1 <= int(count) <= 64:
        raise SettingError("on", f"is {text!r}; give a card, or several as 2xh100-80gb; known: {', '.join(CARDS)}")
    return cards[0], int(count)


class Devices(NamedTuple):
    """The devices of a run."""

    number: int
    type: str
    free: float
    """Bytes per device before anything is loaded."""
    num_shards: int
    """Devices that share the weights; 1: each holds them all."""
    card: Card | None = None
    """None: this machine, whose speed is measured."""

    @classmethod
    def here(cls, recipe: TrainingSettings, accelerator: Accelerator) -> "Devices":
        """Return those of this run; all processes must call this together."""
        number = accelerator.num_processes
        return cls(number, accelerator.device.type, free_memory(accelerator), number if recipe.shard else 1)

    @classmethod
    def of_cards(cls, text: str) -> "Devices":
        """Return cards as `parse_cards` reads them; several share the weights."""
        name, count = parse_cards(text)
        return cls(count, "cuda", CARDS[name].memory, count, CARDS[name])


class Mode(NamedTuple):
    """A training mode and its optimizer."""

    train: str
    """`masks`, `lora` or `weights`."""
    optimizer: str
    """Optimizer of the weights or of the low-rank additions; "" for masks only."""

    def __str__(self) -> str:
        besides = {"masks": "only", "lora": "and low-rank additions", "weights": f"and weights with {self.optimizer}"}
        return f"masks {besides[self.train]}"


MODES = (Mode("weights", "adamw"), Mode("weights", "adamw-8bit"), Mode("lora", "adamw"), Mode("masks", ""))
"""Ordered from the best quality to the least memory."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a run takes of its devices in one mode."""

    mode: Mode
    num_sequences: int
    """Per forward pass and device; passed by the user, or the most that fit."""
    checkpointed: bool
    """Whether layers run forward again in backward."""
    held: float
    """Bytes per device of weights, teacher and what training keeps."""
    passing: float
    """Bytes per device of a forward and backward pass on top of that."""
    free: float
    leaves_out: bool
    """Whether copies of the heads and channels that are still open fit too."""

    @property
    def peak(self) -> float:
        return self.held + self.passing

    def resolved(self) -> dict[str, Any]:
        """Return the fields of a `Run` that it decides."""
        names = ("num_sequences", "checkpointed", "leaves_out")
        return self.mode._asdict() | {name: getattr(self, name) for name in names}


def allowed_modes(recipe: TrainingSettings) -> list[Mode]:
    """Return the training modes that a recipe allows, from the one that recovers the most."""
    train = "masks" if recipe.train == "auto" and getattr(recipe, "controller", "") == "alm" else recipe.train
    return [
        mode
        for mode in suited_modes(recipe)
        if train in ("auto", mode.train) and (mode.train != "weights" or recipe.optimizer in ("auto", mode.optimizer))
    ]


def suited_modes(recipe: TrainingSettings) -> list[Mode]:
    """Return the training modes that a command has and that can train weights of a recipe's dtype."""
    choices = next(option_of(field).choices for field in fields(recipe) if field.name == "train")
    return [mode for mode in MODES if mode.train in choices and optimizer_suits(mode.optimizer, recipe.dtype)]


def rank_of(recipe: TrainingSettings) -> int:
    """Return the rank of low-rank additions; only a recovery can set it."""
    return getattr(recipe, "rank", RANK)


def state_bytes(optimizer: str, itemsize: int) -> int:
    """Return the bytes that training adds to a weight of `itemsize` bytes.

    `adamw` keeps a float32 master of a 16-bit weight, the sum of its gradients and two moments;
    `adamw-8bit` keeps sums of the weight's dtype and moments of 8 bits, and has no masters.
    """
    return {"": 0, "adamw": 12 + 4 * (itemsize < 4), "adamw-8bit": itemsize + 2}[optimizer]


def held_bytes(recipe: TrainingSettings, source: Source, mode: Mode, itemsize: int, num_shards: int) -> float:
    """Return the bytes per device of a model, its teacher, and everything that training keeps.

    In a pruning the teacher shares the embeddings and the output head, which are not trained. A
    pruned model counts as its dense one, which takes at least as much.
    """
    teacher, shapes = recipe.holds_teacher(mode.train), source.memory_shapes
    frozen = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(FROZEN))
    trained = sum(map(math.prod, shapes.values())) - frozen
    optimizer = mode.optimizer if mode.train == "weights" else ""
    layers = float(trained * (itemsize * (1 + teacher) + state_bytes(optimizer, itemsize)))
    if mode.train == "lora":  # experts get no adapters
        others = (*FROZEN, ".experts.")
        adapted = [
            shape for name, shape in shapes.items() if len(shape) == 2 and not any(part in name for part in others)
        ]
        layers += rank_of(recipe) * sum(map(sum, adapted)) * (itemsize + state_bytes("adamw", itemsize))
    copies = 1 + (teacher and not recipe.shares_embeddings)
    return itemsize * frozen * copies + layers / num_shards


def sequences_at_once(recipe: TrainingSettings, devices: Devices) -> int:
    """Return the micro-batch size in sequences before it is fitted to memory."""
    share = -(-recipe.batch_size // devices.number)
    usual = usual_sequences(recipe.batch_size, recipe.seq_len, devices.number, devices.type)
    return min(recipe.micro_batch_size, share) or usual


def fit(recipe: TrainingSettings, source: Source, devices: Devices, mode: Mode) -> Fit:
    """Fit a mode into the memory of devices.

    With `activation_checkpointing` auto, layers are checkpointed if the activations would fill more
    than ACTIVATION_SHARE of the memory, those of half of the sequences too: two smaller passes take
    less time than one that computes every layer again. On a GPU, up to LARGEST_PASS times the usual
    sequences are tried first. Without `micro_batch_size` the number of
    sequences is halved until a pass fits, down to 1, which may still not fit.
    """
    sized = SizedModel(recipe, source, mode, devices)
    held = held_bytes(recipe, source, mode, sized.itemsize, devices.num_shards)
    transient = _transient_bytes(source, mode, sized.itemsize, devices.num_shards)
    left = devices.free - held - transient
    number = sequences_at_once(recipe, devices)
    setting = recipe.activation_checkpointing
    if setting == "auto":
        tried = [number] if recipe.micro_batch_size else [number, number // 2]
        if devices.type == "cuda" and not recipe.micro_batch_size:
            share = -(-recipe.batch_size // devices.number)
            tried = [min(share, LARGEST_PASS * number), min(share, LARGEST_PASS // 2 * number), *tried]
        needed = recipe.seq_len * sized.activation_bytes()  # of one sequence
        fitting = next((count for count in tried if 0 < count * needed <= ACTIVATION_SHARE * left), 0)
        setting, number = ("off", fitting) if fitting else ("on", number)
    checkpointed = setting == "on"
    while number > 1 and not recipe.micro_batch_size and sized.pass_bytes(number, checkpointed) > USABLE * left:
        number //= 2
    passing = sized.pass_bytes(number, checkpointed)
    copies = sum(math.prod(shape) for name, shape in source.memory_shapes.items() if not name.startswith(FROZEN))
    return Fit(
        mode=mode, num_sequences=number, checkpointed=checkpointed, held=held, passing=transient + passing,
        free=devices.free, leaves_out=devices.num_shards == 1 and copies * sized.itemsize + passing <= USABLE * left,
    )  # fmt: skip


def choose(fits: Sequence[Fit]) -> Fit:
    """Return the first fit whose weights and training leave memory for activations, or the last."""
    return next((one for one in fits if one.held <= TRAINING_SHARE * one.free), fits[-1])


def _transient_bytes(source: Source, mode: Mode, itemsize: int, num_shards: int) -> float:
    """Return what exists only for a moment of a step.

    Sharded: two gathered layers in the model's dtype, and a layer's gradient in that and in
    float32, in which it is summed. On one device: the gradient of the largest trained tensor.
    """
    is_trained = mode.train == "weights"
    layers, tensors = Counter[str](), Counter[str]()
    for name, shape in source.memory_shapes.items():
        if not name.startswith(FROZEN):
            layer, _, tensor = name.removeprefix("model.layers.").partition(".")
            layers[layer] += math.prod(shape)
            # experts are one tensor in memory
            stacked = tensor.partition(".experts.")[0] if ".experts." in tensor else tensor
            tensors[f"{layer}.{stacked}"] += math.prod(shape) * 2 // 3 if ".experts." in tensor else math.prod(shape)
    if num_shards > 1:
        return max(layers.values()) * (2 * itemsize + is_trained * (itemsize + 4))
    return is_trained * (itemsize + 4) * max(tensors.values())


class SizedModel:
    """A model without weights, and what the memory of its passes depends on."""

    def __init__(self, recipe: TrainingSettings, source: Source, mode: Mode, devices: Devices) -> None:
        """Build the model on torch's meta device, with the attention that the run uses."""
        self.sizes, self.seq_len, self.is_trained = source.sizes, recipe.seq_len, mode.train != "masks"
        self.device = torch.device(devices.type)
        options = loading_options(source, recipe.dtype, None if devices.card else self.device)
        with reading(source.folder, ModelError, AGAIN), torch.device("meta"):
            config = options.pop("config", None) or stock_config(source.folder)
            self.model: Any = auto_class(config).from_config(config, trust_remote_code=False, **options)
        fit_attention(self.model, recipe.seq_len, self.device)
        self.itemsize = int(self.model.dtype.itemsize)
        text_config = self.model.config.get_text_config().to_dict()
        # routed experts that a token is sent to, per layer that has them
        self.num_slots = count_chosen_experts(text_config) if self.sizes.num_experts else 0

    def activation_bytes(self) -> int:
        """Estimate the bytes per token that all layers keep for backward without checkpointing.

        Norms: a layer keeps the inputs of two norms in float32; with trained weights, their outputs
            too.
        Attention: queries, keys, values and the output; SDPA keeps its output once more, eager
            attention keeps its weights for all tokens of the sequence, in float32 and in the
            model's dtype.
        MLP: four rows of channels: before and after the activation function, the other factor and
            the gated product. Routed experts: 4·C + H numbers per slot (`experts.py`).
        """
        sizes, itemsize = self.sizes, self.itemsize
        queries, keys = sizes.num_query_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        attention = (2 * queries + 2 * keys) * itemsize
        if self.model.config._attn_implementation == "eager":
            attention += (4 if itemsize == 4 else 4 + itemsize) * sizes.num_query_heads * self.seq_len
        else:
            attention += queries * itemsize
        routed = len(sizes.routed_layers)
        channels = (sizes.num_layers - routed) * 4 * sizes.intermediate_size
        experts = routed * self.num_slots * (4 * sizes.expert_intermediate_size + sizes.hidden_size)
        norms = (8 + 2 * itemsize * self.is_trained) * sizes.hidden_size
        return sizes.num_layers * (norms + attention) + itemsize * (channels + experts)

    def pass_bytes(self, num_sequences: int, checkpointed: bool) -> float:
        """Estimate the bytes of a forward and backward pass on top of the weights.

        The backward of the widest gate adds the incoming gradient, its product with the input in
        float32, and the squares or a copy of that product.
        """
        sizes, num_tokens = self.sizes, num_sequences * self.seq_len
        kept = num_tokens * self.activation_bytes()
        if checkpointed:
            kept = num_tokens * sizes.num_layers * sizes.hidden_size * self.itemsize + kept // sizes.num_layers
        channels = sizes.intermediate_size if len(sizes.routed_layers) < sizes.num_layers else 0
        gates = (4 + 4 + self.itemsize) * max(channels, self.num_slots * sizes.expert_intermediate_size)
        return kept + num_tokens * gates + head_bytes(self.model, self.device)


def flops_per_token(recipe: Recipe, source: Source, fitted: Fit) -> float:
    """Return the FLOPs of training per token of a sequence: of the teacher's forward, forward,
    forward again of checkpointed layers, gradients of activations, and gradients of trained
    weights."""
    fixed = "flops", source.config, source.widths.dense_layers, source.shapes
    products = whole_model(*fixed, 0)
    attention = whole_model(*fixed, recipe.seq_len // 2) - products  # a token attends to half of the others
    forwards = (recipe.distillation > 0) + 1 + fitted.checkpointed
    return products * (forwards + 1 + (fitted.mode.train == "weights")) + attention * (forwards + ATTENTION_BACKWARD)


def tokens_per_second(recipe: Recipe, source: Source, devices: Devices, fitted: Fit) -> float:
    """Return the speed of training on cards, all of them together."""
    assert devices.card
    is_float32 = loading_options(source, recipe.dtype, None)["dtype"] == torch.float32
    peak = devices.card.flops_of_float32 if is_float32 else devices.card.flops
    computing = flops_per_token(recipe, source, fitted) / (UTILIZATION * peak)
    launching = LAUNCH_SECONDS * source.sizes.num_layers / (fitted.num_sequences * recipe.seq_len)
    return devices.number / max(computing, launching)


def gigabytes(number: float) -> str:
    """Write bytes for people, in powers of 1,000."""
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"
