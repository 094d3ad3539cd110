"""Configurations of pruned models: the dense family's own, plus `ddp_layers`.

Every stock field keeps its dense value (transformers and vLLM read them as integers).
This file travels inside checkpoints: transformers only, no torch.
"""

from typing import Any

from transformers import LlamaConfig

from .widths import parse_layers


class DDPLlamaConfig(LlamaConfig):
    """Llama with its own widths in every layer; `ddp_layers=None` is the dense model.

    Raises: WidthsError (a ValueError) if the widths contradict the dense fields.
    """

    model_type = "ddp_llama"

    ddp_layers: list[dict[str, Any]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.ddp_layers is not None:
            parse_layers(vars(self))


CONFIGS = (DDPLlamaConfig,)
