"""What the frozen model keeps between forward and backward: less where memory is short, more where that is faster.

Linear layers with frozen weights keep nothing; what is kept is what norms, attention, activation functions and gates
need. With checkpointing a layer keeps its input alone, and runs forward again in backward.
"""

from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ddp_prune.gates import GatedModel
from ddp_prune.objective import head_bytes
from ddp_prune.processes import USABLE, free_memory

SHARE_OF_FREE = 0.5  # of free memory for activations, else they are checkpointed
EAGER_TOKENS = 512  # a sequence, up to which attention's weights are written down on a CPU


def fit_activations(gated: GatedModel, setting: str, num_sequences: int, seq_len: int, accelerator: Accelerator) -> int:
    """Choose how attention is computed, switch checkpointing `on` or `off`, and return how many sequences fit.

    `auto` asks whether half of free memory holds what `num_sequences` of `seq_len` tokens keep. They are halved until
    a pass fits, down to one, which may still not fit; all processes get the same number.
    """
    fit_attention(gated.model, seq_len, accelerator.device)
    free = free_memory(accelerator)
    if setting == "auto":
        needed = num_sequences * seq_len * activation_bytes(gated, seq_len)
        setting = "on" if needed > SHARE_OF_FREE * free else "off"
    checkpoint_layers(gated.model, setting == "on")
    while num_sequences > 1 and pass_bytes(gated, num_sequences, seq_len) > USABLE * free:
        num_sequences //= 2
    # sharded weights are gathered by all for every pass
    return int(accelerator.gather(torch.tensor([num_sequences], device=accelerator.device)).min())


def fit_attention(model: Any, seq_len: int, device: torch.device) -> None:
    """Let short sequences in bfloat16 on a CPU write attention's weights down: its fused kernel is slow backward there.

    One layer of SmolLM2, forward and backward: 2×256 tokens 10 ms instead of 21, 1×512 24 and 31, 1×2,048 950 and 260.
    Not where keys have a bias, as Qwen2's: their large products lose too much in bfloat16 (KL 4e-3 instead of 8e-4).
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


def pass_bytes(gated: GatedModel, num_sequences: int, seq_len: int) -> int:
    """Return about how many bytes a pass forward and backward takes beside the weights, layers as they now are."""
    num_tokens, num_layers = num_sequences * seq_len, gated.sizes.num_layers
    kept = num_tokens * activation_bytes(gated, seq_len)
    if any(getattr(layer, "gradient_checkpointing", False) for layer in gated.model.modules()):
        itemsize = next(gated.model.parameters()).dtype.itemsize
        kept = num_tokens * num_layers * gated.sizes.hidden_size * itemsize + kept // num_layers
    return kept + head_bytes(gated.model)


def activation_bytes(gated: GatedModel, seq_len: int) -> int:
    """Return about how many bytes a token keeps for backward in all layers, without checkpointing.

    A layer keeps two norms' inputs in float32, queries, keys, values and the output of attention, and four rows of MLP
    channels (before and after the activation function, the other factor, and the product that is gated). Routed
    experts keep 4·C + H a slot (`experts.py`); kernels that copy keep a little more. Fused attention keeps its output
    once more; else its weights are kept, for all tokens of a sequence: in float32 and, if that is another, in the
    model's format.
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
    return sizes.num_layers * (8 * sizes.hidden_size + attention) + itemsize * (channels + experts)
