"""The GPUs for which a dry run estimates memory and time."""

from dataclasses import dataclass

from ddp_vllm.errors import SettingError


@dataclass(frozen=True)
class Card:
    """A GPU: usable bytes of memory, and FLOPs per second by its data sheet: of dense products in 16
    bits, and in float32, for which torch uses no tensor cores."""

    memory: float
    flops: float
    flops_of_float32: float


CARDS = {
    "rtx4090-24gb": Card(23.5 * 2**30, 165e12, 82.6e12),
    "a100-80gb": Card(79.1 * 2**30, 312e12, 19.5e12),
    "h100-80gb": Card(79.1 * 2**30, 989e12, 67e12),
    "h200-141gb": Card(139.8 * 2**30, 989e12, 67e12),
}


def parse_cards(text: str) -> tuple[str, int]:
    """Read `h100-80gb` or `2xh100-80gb`: the name of a card, and how many. Raises: SettingError."""
    count, _, name = text.partition("x") if text[:1].isdigit() else ("1", "", text)
    if name not in CARDS or not count.isdigit() or not 1 <= int(count) <= 64:
        raise SettingError("on", f"is {text!r}; give a card, or several as 2xh100-80gb; known: {', '.join(CARDS)}")
    return name, int(count)
