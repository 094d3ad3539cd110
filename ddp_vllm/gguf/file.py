"""A model as one GGUF file for stock llama.cpp and the programs built on it, like Ollama and LM
Studio.

llama.cpp's graph `deci` reads query heads, KV heads and MLP channels layer by layer. Widths that it
cannot hold are zero-padded: uneven groups to the largest of their layer, channels to whole blocks
of 32, no head in the first layer to one head, and a removed MLP to one block. If all layers are
alike, as in a dense model, the graph is `llama`, which computes the same. Nothing here imports
torch.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf.utility import LocalTensor, SafetensorsLocal

from ddp_vllm.checkpoint import Checkpoint, read_checkpoint, read_config
from ddp_vllm.errors import ModelError, SettingError, reading
from ddp_vllm.gguf.graphs import missing_parts, rope_of
from ddp_vllm.gguf.tokenizer import add_tokenizer
from ddp_vllm.output import atomic_file, check_file, writing
from ddp_vllm.remote_code.files import weight_files
from ddp_vllm.remote_code.tensors import FAMILIES, LAYERS, Config, dense_type
from ddp_vllm.remote_code.widths import LayerWidths, Widths, states_widths

TYPES = ("F32", "F16", "BF16", "Q8_0")
BLOCK = 32
"""Numbers of a row that share a scale in Q8_0."""
AGAIN = "copy the folder again, whole"
FACTORS = "rope_freqs.weight"  # a tensor of the file; a folder states them in its config


class _Tensor(NamedTuple):
    """One tensor of the file."""

    name: str
    """Its name in the safetensors of the folder, whether the folder has the tensor or not."""
    gguf_name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType


def write_gguf(folder: Path, output: Path, type_name: str, *, overwrite: bool = False) -> list[str]:
    """Write a pruned or dense model as a GGUF file; return notes about it for the user.

    Raises: SettingError for a type that cannot be written, ModelError for a model that llama.cpp
        would compute differently, CheckpointError, OutputError.
    """
    if type_name not in TYPES:
        raise SettingError(
            f"--outtype {type_name.lower()} is none of {', '.join(TYPES).lower()}; export f16, from which "
            "llama-quantize makes other types"
        )
    check_file(output, overwrite=overwrite, begins="GGUF")
    # first, because the rest reads what those graphs need
    if not (reason := _without_graph(read_config(folder))):
        checkpoint = read_checkpoint(folder, dense=True)
        reason = _unfit(checkpoint.config)
    if reason:
        raise ModelError(f"{folder} does not fit llama.cpp: {reason}")
    kind = gguf.GGMLQuantizationType[type_name]
    widths = replace(checkpoint.widths, layers=tuple(map(_padded, range(len(checkpoint.layers)), checkpoint.layers)))
    stored = {name: tensor for file in weight_files(folder) for name, tensor in SafetensorsLocal(file).tensors.items()}
    tensors = list(_tensors(checkpoint, widths, kind))
    graph = "llama" if len(set(widths.layers)) == 1 else "deci"
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(output) as temporary, closing(gguf.GGUFWriter(None, graph)) as writer:
            writer.add_file_type(gguf.LlamaFileType["ALL_F32" if type_name == "F32" else f"MOSTLY_{type_name}"])
            with reading(f"config.json or the tokenizer of {folder}", ModelError, AGAIN):
                _add_sizes(writer, checkpoint, widths)
                notes = add_tokenizer(writer, folder, checkpoint.config["vocab_size"])
            for tensor in tensors:
                as_given = np.dtype(np.float32)  # of the arrays below; the type is that on disk
                num_bytes = math.prod(gguf.quant_shape_to_byte_shape(tensor.shape, tensor.type))
                writer.add_tensor_info(tensor.gguf_name, tensor.shape, as_given, num_bytes, tensor.type)
            writer.write_header_to_file(temporary)
            with reading(f"the tokenizer of {folder}", ModelError, AGAIN, but=(OSError,)):
                writer.write_kv_data_to_file()  # half a character is no text
            writer.write_ti_data_to_file()
            for array in _arrays(checkpoint, widths, stored, tensors):
                writer.write_tensor_data(array)
    return notes + _notes(checkpoint.layers, widths.layers, tensors, kind)


def _without_graph(config: Config) -> str | None:
    """Return why neither graph is of this architecture; None if one is."""
    model_type = dense_type(config)
    if states_widths(config):
        return f"llama.cpp has no graph of {model_type} with widths per layer; serve it with vLLM"
    if model_type not in FAMILIES:
        return f"it is a stock {model_type} checkpoint, which llama.cpp's own convert_hf_to_gguf.py converts"
    return None


def _unfit(config: Config) -> str:
    """Return why the graphs `deci` and `llama` would not compute this model exactly; "" if they do."""
    if config.get("quantization_config"):
        return "it is quantized already; export the folder it was made from"
    lacks = missing_parts(config)
    return lacks and f"its graph for layers of different widths has no place for {lacks}; serve the model with vLLM"


def _padded(index: int, layer: LayerWidths) -> LayerWidths:
    """Return the widths of a layer in the file.

    llama.cpp reads the size of a head only if layer 0 has one, and it leaves a layer without
    channels before it adds the output of attention.
    """
    groups = layer.query_heads_per_kv_head or ((1,) if index == 0 else ())
    return LayerWidths(
        query_heads_per_kv_head=(max(groups, default=0),) * len(groups),
        intermediate_size=max(1, math.ceil(layer.intermediate_size / BLOCK)) * BLOCK,
    )


def _add_sizes(writer: gguf.GGUFWriter, checkpoint: Checkpoint, widths: Widths) -> None:
    config, layers = checkpoint.config, widths.layers

    def counts(numbers: Iterator[int]) -> int | list[int]:
        return list(numbers) if writer.arch == "deci" else next(numbers)

    writer.add_type("model")
    writer.add_name(checkpoint.folder.resolve().name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(len(layers))
    writer.add_head_count(counts(layer.num_query_heads for layer in layers))
    writer.add_head_count_kv(counts(layer.num_kv_heads for layer in layers))
    writer.add_feed_forward_length(counts(layer.intermediate_size for layer in layers))
    writer.add_key_length(widths.head_dim)
    writer.add_value_length(widths.head_dim)
    writer.add_rope_dimension_count(widths.head_dim)
    writer.add_rope_freq_base(rope_of(config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_vocab_size(config["vocab_size"])


def _tensors(checkpoint: Checkpoint, widths: Widths, kind: gguf.GGMLQuantizationType) -> Iterator[_Tensor]:
    """Yield the tensors of the file, in order. Raises: ModelError for a tensor that llama.cpp has
    no place for."""
    if rope_of(checkpoint.config)["rope_type"] == "llama3":
        float32 = gguf.GGMLQuantizationType.F32
        yield _Tensor(name=FACTORS, gguf_name=FACTORS, shape=(widths.head_dim // 2,), type=float32)
    shapes = {name: tuple(shape) for name, shape in checkpoint.shapes.items() if not name.endswith("inv_freq")}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DECI, len(widths.layers))
    for name, shape in (shapes | _missing(checkpoint, widths)).items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise ModelError(f"{checkpoint.folder} does not fit llama.cpp, which has no place for the tensor {name}")
        if (place := widths.find(name)) and place.length is not None:
            shape = (*shape[: place.axis], place.length, *shape[place.axis + 1 :])
        yield _Tensor(name=name, gguf_name=gguf_name, shape=shape, type=_type_of(shape, kind))


def _missing(checkpoint: Checkpoint, widths: Widths) -> dict[str, tuple[int, ...]]:
    """Return the weights of padded blocks that the folder does not have; their shapes still lack
    the widths."""
    hidden: int = checkpoint.config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(len(widths.layers)):
        for module in widths.modules(index):
            name = f"{LAYERS}.{index}.{module}.weight"
            if name not in checkpoint.shapes:
                shapes[name] = (hidden, hidden) if widths.table.find(module) else (hidden,)
    return shapes


def _type_of(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    """Return the type of a tensor: the requested one, except for vectors and rows of broken
    blocks."""
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind


def _arrays(
    checkpoint: Checkpoint, widths: Widths, stored: Mapping[str, LocalTensor], tensors: list[_Tensor]
) -> Iterator[np.ndarray]:
    """Yield each tensor in its type; one is in memory at a time."""
    for tensor in tensors:
        array = np.zeros(tensor.shape, np.float32)
        if tensor.name == FACTORS:
            array[:] = _rope_factors(rope_of(checkpoint.config), widths.head_dim)
        elif tensor.name in stored:
            array[_positions(tensor.name, checkpoint.widths, widths)] = _read(stored[tensor.name])
        if ".attn_q." in tensor.gguf_name or ".attn_k." in tensor.gguf_name:
            array = _rotated_pairs_adjacent(array, widths.head_dim)
        yield gguf.quantize(array, tensor.type)


def _read(tensor: LocalTensor) -> np.ndarray:
    """Return a tensor in float32."""
    if tensor.dtype not in ("BF16", "F16", "F32"):
        raise ModelError(f"weights are {tensor.dtype}; exported are bfloat16, float16 and float32")
    return gguf.dequantize(tensor.mmap_bytes(), gguf.GGMLQuantizationType[tensor.dtype]).reshape(tensor.shape)


def _positions(name: str, before: Widths, after: Widths) -> Any:
    """Return the positions of the folder's tensor in the file's, which is zero elsewhere."""
    if (place := after.find(name)) is None or place.length is None:
        return ...
    projection, layer = place.projection, before.layers[place.layer]
    if projection.units == ("query_head",):
        groups = np.array(layer.query_heads_per_kv_head)
        taken = (np.arange(groups.max()) < groups[:, None]).repeat(before.head_dim)
    else:
        taken = np.arange(place.length) < layer.num_units(projection.units[0]) * projection.unit_size(before.head_dim)
    return (slice(None),) * place.axis + (taken,)


def _rotated_pairs_adjacent(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Put the two rows that are rotated together next to each other, within each head of [heads ·
    head_dim, …]."""
    return array.reshape(-1, 2, head_dim // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _rope_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Return the divisor of each frequency in Llama 3 [head_dim / 2]: `factor` for long waves, 1
    for short ones.

    Waves between are divided by a mean of both. The same as transformers'
    `_compute_llama3_parameters`.
    """
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _notes(
    before: tuple[LayerWidths, ...],
    after: tuple[LayerWidths, ...],
    tensors: list[_Tensor],
    kind: gguf.GGMLQuantizationType,
) -> list[str]:
    """Return which widths were zero-padded, and which tensors have another type than the requested
    one."""
    notes = []
    pairs = list(zip(before, after, strict=True))
    for what, unit, why in (
        ("MLP channels", "channel", f"every layer requires {BLOCK} or a multiple of {BLOCK}"),
        ("query heads", "query_head", "KV heads of a layer require equally many, and layer 0 one"),
    ):
        added = [new.num_units(unit) - old.num_units(unit) for old, new in pairs]
        if any(added):
            notes.append(f"zero-padded: {sum(added)} {what} in {sum(map(bool, added))} layers, because {why}")
    others = Counter(tensor.type.name for tensor in tensors if len(tensor.shape) > 1 and tensor.type != kind)
    notes += [f"{count} matrices are {name} instead of {kind.name}" for name, count in others.items()]
    return notes
