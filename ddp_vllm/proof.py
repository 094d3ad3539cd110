"""Proves a written folder: a fresh process reads it as its users will, and what it reads is compared
with the model that was measured.

transformers decides by names that a pruned folder does not share with the dense model: a tokenizer's
class by the Hub's name, a repair of its pattern by `model_type`, positions by the type of a layer.
No list of such names is complete, so every verb that writes a model looks at the result:

    reference = reference_of(model, tokenizer, blocks)  # of the measured model
    with atomic_folder(output) as folder:
        write_model(folder, …)
        write_masks(…, provenance={…, **prove(folder, reference)})

A folder whose masks file states a fault does not become `output` (`atomic_folder`). Nothing here
imports torch.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ddp_vllm.checkpoint import read_config
from ddp_vllm.families import code_of
from ddp_vllm.remote_code.files import short
from ddp_vllm.settings import Option

Proof = Annotated[
    bool,
    Option("Do not compare the written folder, as a fresh process loads it, with the model.", heading="Rarely needed"),
]
"""The parameter of a verb that writes a model."""
ODD = (
    "naïve  ½ ﬁ e\u0301 \u4f60\u597d \U0001f469\u200d\U0001f680\t\r\n\n  0123456789 it's </s> <|x|> "
    "don't—STOP…\u00a0\u200bend "
)
"""A text of what tokenizers treat differently: blanks, digits, accents, ligatures, joined emoji."""
PROSE = (
    "In 1969, three astronauts flew to the Moon; two of them walked on it, and all three came back. "
    "def area(r):\n    return 3.14159 * r ** 2  # of a circle\n"
)
"""A text for verbs that are given none."""
MOST_TOKENS, MOST_POSITIONS = 256, 64
"""Of the one block that is read, so that the largest models are read in minutes on a CPU."""
TOLERANCE = {"float32": 2e-3, "float16": 2e-2, "bfloat16": 6e-2}
"""Number format -> the largest distance of logits (`distance`) that rounding explains; a model that
is not the same one is above 0.3. Seen: 2e-2 of SmolLM2-135M, pruned in float32 and stored in bfloat16."""
SCRIPT = Path(__file__).with_name("read_back.py")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a written folder must repeat. Without logits, they must only be finite."""

    texts: Sequence[str] = (PROSE, ODD)
    read: Mapping[str, Any] | None = None
    """What the dense model's tokenizer makes of the texts (`read_tokens`); None: it has none."""
    tokens: Sequence[int] = tuple(range(1, 33))
    """Of the block whose logits are compared."""
    logits: Any = None
    """Of the measured model at `positions`, a numpy array, float32 [positions, vocab_size]."""
    dtype: str = "float32"
    """In which the measured model computes."""
    tolerance: float = 0.0
    """At least; that of the number formats is a lower limit too."""


def positions_in(tokens: Sequence[int]) -> list[int]:
    """Return the positions of a block whose logits are compared."""
    last, number = len(tokens) - 1, min(len(tokens), MOST_POSITIONS)
    return sorted({last * index // max(1, number - 1) for index in range(number)})


def prove(folder: Path, reference: Reference | None) -> dict[str, Any]:
    """Return what a masks file states of the folder that it lies in, under `proof`; nothing without
    a reference, as after --no-proof.

    `tokens` are equal, `logits` have this distance from those of the measured model, `tolerance` is its
    limit, `fault` what differs, "" if nothing does.
    """
    if reference is None:
        return {"proof": {}}
    read, logits = read_back(folder, reference.texts if reference.read else (), reference.tokens)
    if error := read.get("error"):
        return {"proof": {"fault": f"transformers cannot load it ({error})"}}
    tolerance = max(reference.tolerance, *(TOLERANCE.get(name, 0.06) for name in (reference.dtype, read["dtype"])))
    far = distance(logits, logits if reference.logits is None else reference.logits)
    proof: dict[str, Any] = {"tolerance": tolerance, "fault": difference(reference, read)}
    if reference.logits is not None and far < math.inf:
        proof["logits"] = far
    if reference.read:
        proof["tokens"] = sum(map(len, read["texts"]["tokens"]))
    if not proof["fault"] and far > tolerance:
        proof["fault"] = (
            f"its logits are {far:.2g} away from those of the model that was measured, of which rounding explains "
            f"{tolerance:g}"
        )
    return {"proof": proof}


def difference(reference: Reference, read: Mapping[str, Any]) -> str:
    """Return in words what a folder's tokenizer makes otherwise than the dense model's; "" if
    nothing."""
    for name, expected in (reference.read or {}).items():
        for one, other in zip(expected, read["texts"][name], strict=True):
            if one != other:
                start = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
                shown = [short(repr(values[start : start + 8])) for values in (other, one)]
                return f"its tokenizer has other {name} than the dense model's: {' instead of '.join(shown)} at {start}"
    return ""


def distance(logits: Any, expected: Any) -> float:
    """Return the root mean square of the difference of logits over that of the expected ones, both
    without their mean at each position; infinite if one is not finite."""
    import numpy as np

    if logits.shape != expected.shape or not (np.isfinite(logits).all() and np.isfinite(expected).all()):
        return math.inf
    one, other = (values - values.mean(-1, keepdims=True) for values in (logits, expected))
    return float(np.sqrt(np.square(one - other).mean() / max(np.square(other).mean(), 1e-30)))


def read_back(folder: Path, texts: Sequence[str], tokens: Sequence[int]) -> tuple[dict[str, Any], Any]:
    """Read a folder in a fresh process, on the CPU and without a network. Return what its tokenizer
    makes of texts, or under `error` why that or the model cannot be loaded, and the logits of tokens.

    Only code of ours in the folder runs.
    """
    from safetensors.numpy import safe_open

    with tempfile.TemporaryDirectory() as work:
        request, result = Path(work, "request.json"), Path(work, "result.safetensors")
        asked = {"texts": list(texts), "tokens": list(tokens), "positions": positions_in(tokens)}
        request.write_text(json.dumps(asked | {"has_our_code": bool(code_of(read_config(folder)))}), encoding="utf-8")
        modules = f"{work}/modules"
        # first, for a caller's path may lead to modules that transformers keeps of other models
        paths = os.pathsep.join(filter(None, (modules, os.environ.get("PYTHONPATH"))))
        alone = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": modules, "PYTHONPATH": paths}
        # torchrun lets each of its processes have one thread
        dropped = {"OMP_NUM_THREADS"} if "RANK" in os.environ else set()
        environment = {name: value for name, value in os.environ.items() if name not in dropped} | alone
        # -P: else modules of ours, such as schema, would hide those of that name
        command = [sys.executable, "-P", str(SCRIPT), *map(str, (folder.absolute(), request, result))]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
        if ended.returncode:
            return {"error": f"exit code {ended.returncode}, is memory short? {ended.stderr[-300:].strip()}"}, None
        with safe_open(result, framework="numpy") as file:
            logits = file.get_tensor("logits") if "logits" in file.keys() else None  # noqa: SIM118 (no mapping)
            return json.loads((file.metadata() or {})["read"]), logits
