"""The verb export as a function of `ddp_vllm`: a model as one GGUF file. The package gguf is
imported when it runs."""

from pathlib import Path

from ddp_vllm.errors import line_printer


def export(
    folder: str | Path, *, output: str | Path, outtype: str = "f16", overwrite: bool = False, verbose: bool = False
) -> Path:
    """Write a pruned or dense model as one GGUF file for stock llama.cpp, and return its path.

    outtype: f32, f16, bf16 or q8_0. verbose: print which tensors were zero-padded.
    """
    from ddp_vllm.gguf.file import write_gguf

    for note in write_gguf(Path(folder), Path(output), outtype.upper(), overwrite=overwrite):
        line_printer(verbose)(note)
    return Path(output)
