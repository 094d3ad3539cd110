"""SmolLM2-135M as 4-bit codes: packed from its GGUF file, and made a Hugging Face folder again
without a network.

    python weights.py IN.codes FOLDER     # on the GPU machine; requires torch and safetensors only, 3 s

`pack.py` calls `pack`, which requires gguf and fails unless the folder comes back to the bit.
"""

import json
import lzma
import struct
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def decode(kind: str, data: bytes, shape: list[int]) -> torch.Tensor:
    """Dequantize one tensor as llama.cpp does, rounded to bfloat16."""
    codes = np.frombuffer(data, np.uint8)

    def half(columns: slice, blocks: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(blocks[..., columns]).view(np.float16).astype(np.float32)

    if kind == "F32":
        values = codes.view(np.float32)
    elif kind == "Q8_0":
        blocks = codes.reshape(-1, 34)
        values = np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * half(slice(2), blocks)
    else:
        assert kind == "Q4_1", kind
        blocks = codes.reshape(-1, 20)
        nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=-1).astype(np.float32)
        values = nibbles * half(slice(2), blocks) + half(slice(2, 4), blocks)
    return torch.from_numpy(values.copy()).reshape(shape).bfloat16()


def write_codes(out: Path, files: Mapping[str, bytes], tensors: Mapping[str, tuple[str, list[int], bytes]]) -> None:
    """Write files and the codes of tensors: a header with the place of each part, then the
    compressed parts."""
    header: dict[str, dict[str, list]] = {"files": {}, "tensors": {}}
    parts, at = [], 0
    for kind, entries in (("files", files), ("tensors", tensors)):
        for name, entry in entries.items():
            facts, content = ([], entry) if kind == "files" else ([*entry[:2]], entry[2])
            parts.append(lzma.compress(content, preset=1))
            header[kind][name] = [at, len(parts[-1]), *facts]
            at += len(parts[-1])
    head = json.dumps(header).encode()
    out.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(parts))


def read_codes(path: Path) -> tuple[dict[str, bytes], dict[str, torch.Tensor]]:
    """Return the files and the tensors in bfloat16."""
    raw = path.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    header, body = json.loads(raw[8 : 8 + size]), memoryview(raw)[8 + size :]

    def tensor(entry: list) -> torch.Tensor:
        at, length, kind, shape = entry
        return decode(kind, lzma.decompress(body[at : at + length]), shape)

    with ThreadPoolExecutor(8) as pool:  # lzma releases the lock
        tensors = dict(zip(header["tensors"], pool.map(tensor, header["tensors"].values()), strict=True))
    return {n: lzma.decompress(body[at : at + length]) for n, (at, length) in header["files"].items()}, tensors


def pack(gguf: Path, folder: Path, out: Path) -> None:
    """Pack a GGUF file whose dequantized weights are those of the folder."""
    from gguf import GGUFReader

    config, tensors = json.loads((folder / "config.json").read_text()), {}
    for tensor in GGUFReader(gguf).tensors:
        pieces = tensor.name.split(".")
        name = NAMES.get(tensor.name) or f"model.layers.{pieces[1]}.{PARTS[pieces[2]]}.weight"
        shape = [int(size) for size in reversed(tensor.shape)]
        data = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(shape[0] if len(shape) > 1 else 1, -1)
        if heads := HEADS.get(pieces[2] if len(pieces) > 2 else ""):
            # llama.cpp interleaves the two halves of every head's rotation
            data = data.reshape(config[heads], shape[0] // config[heads] // 2, 2, -1).swapaxes(1, 2)
        tensors[name] = tensor.tensor_type.name, shape, np.ascontiguousarray(data).tobytes()
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}
    write_codes(out, files, tensors)
    expected, unpacked = load_file(folder / "model.safetensors"), read_codes(out)[1]
    expected.pop("lm_head.weight", None)
    wrong = [name for name in expected.keys() | unpacked.keys() if not _same(expected.get(name), unpacked.get(name))]
    assert not wrong, f"{wrong[:3]} differ from {folder}"


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a.view(torch.int16), b.view(torch.int16))


def make(codes: Path, folder: Path) -> None:
    """Write the Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files, tensors = read_codes(codes)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    make(*map(Path, sys.argv[1:3]))
