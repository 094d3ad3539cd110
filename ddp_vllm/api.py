"""The commands as Python functions. Settings are keyword arguments; each function returns what it
made.

    import ddp_vllm

    pruned = ddp_vllm.prune("HuggingFaceTB/SmolLM2-135M", sparsity=0.2, output="./pruned")
    print(pruned.num_parameters)

The functions print nothing unless `verbose` is set, and raise a child of `DdpError` for an error
that the user can correct. `import ddp_vllm` is fast: the first access to a function imports its
package, and the first call imports torch.
"""

# The two tables below are the only part of this package that names the packages that import it.

import importlib
from typing import TYPE_CHECKING, Any

from ddp_vllm.errors import (
    CheckpointError,
    DdpError,
    LimitError,
    ModelError,
    OutputError,
    ServingError,
    SettingError,
    TextError,
    TrainingError,
)

if TYPE_CHECKING:  # the same functions, for editors and mypy
    from ddp_benchmarks.verbs import bench, bench_steps, evaluate, profile
    from ddp_prune.recipe import Recipe
    from ddp_prune.verbs import apply, evaluate_text, plan, prune, prune_sizes, quantize, recover, trim
    from ddp_vllm.checkpoint import Checkpoint
    from ddp_vllm.conversion.verb import convert
    from ddp_vllm.pages.verbs import compare, export, inspect, push, read, report

__all__ = [  # noqa: RUF022  (in the order of docs/api.md)
    "prune", "prune_sizes", "plan", "recover", "apply", "quantize", "trim", "convert", "export", "read", "inspect",
    "push", "report", "profile", "bench", "bench_steps", "evaluate", "evaluate_text", "compare",
    "Recipe", "Checkpoint", "DdpError", "SettingError", "ModelError", "TextError", "OutputError", "TrainingError",
    "CheckpointError", "ServingError", "LimitError",
]  # fmt: skip

FUNCTIONS = {  # module -> the public names it defines
    "ddp_prune.verbs": ("prune", "prune_sizes", "plan", "apply", "recover", "quantize", "trim", "evaluate_text"),
    "ddp_benchmarks.verbs": ("profile", "bench", "bench_steps", "evaluate"),
    "ddp_vllm.pages.verbs": ("read", "inspect", "report", "compare", "push", "export"),
    "ddp_vllm.conversion.verb": ("convert",),
    "ddp_prune.recipe": ("Recipe",),
    "ddp_vllm.checkpoint": ("Checkpoint",),
}

COMMANDS = {  # command -> (module that defines it, line in the list of commands)
    "prune": ("ddp_prune.verbs", "Find the units a model needs least, remove them and write the smaller model."),
    "recover": ("ddp_prune.verbs", "Train a pruned model on the dense model's outputs to recover quality."),
    "apply": ("ddp_prune.verbs", "Prune a model by a published masks file, without training."),
    "quantize": ("ddp_prune.verbs", "Quantize a pruned or dense model with llm-compressor."),
    "trim": ("ddp_prune.verbs", "Remove the tokens that text uses least from a dense model."),
    "convert": ("ddp_vllm.conversion.verb", "Write a model that another tool pruned as a folder that vLLM serves."),
    "export": ("ddp_vllm.pages.verbs", "Write a model as one GGUF file for llama.cpp."),
    "inspect": ("ddp_vllm.pages.verbs", "Show the widths of a pruned checkpoint, layer by layer."),
    "push": ("ddp_vllm.pages.verbs", "Publish a pruned checkpoint on the Hugging Face hub."),
    "report": ("ddp_vllm.pages.verbs", "Draw what was removed from a checkpoint as one page, report.html."),
    "profile": ("ddp_benchmarks.verbs", "Measure the time of a step on this machine by the widths of the layers."),
    "bench": ("ddp_benchmarks.verbs", "Measure pruned models against the dense model in real vLLM."),
    "eval": ("ddp_benchmarks.verbs", "Evaluate a model on the paper's tasks through lm-eval."),
    "compare": ("ddp_vllm.pages.verbs", "Put quality and speed of pruned models on one page."),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is used."""
    for module, names in FUNCTIONS.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'ddp_vllm' has no attribute {name!r}")
