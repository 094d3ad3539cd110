"""The settings of a comparison on text, apart from fidelity.py, so that they are checked before
torch is imported."""

from dataclasses import dataclass

from ddp_vllm.errors import SettingError
from ddp_vllm.provenance import bare_name


@dataclass(frozen=True, kw_only=True)
class FidelitySettings:
    """Settings of a comparison."""

    model: str
    texts: tuple[str, ...]
    """Files or hub datasets, as for `prune`. In conversations only the assistant's turns are
    evaluated."""
    against: str = ""
    """The model to compare with; "": the dense model that a pruned folder was made from."""
    max_length: int = 2048
    """Tokens per block, which is the longest context."""
    tokens: int = 16_384
    """Tokens of each text, of which `texts` may evaluate only some."""
    dtype: str = "auto"

    def check(self) -> None:
        """Refuse settings out of range. Raises: SettingError."""
        if self.max_length < 16:
            raise SettingError(f"--max-length {self.max_length} is below 16")
        if self.tokens < self.max_length:
            raise SettingError(f"--tokens {self.tokens:,} is below --max-length {self.max_length:,}")
        if not self.texts:
            raise SettingError("--text names no text; give a file or a hub dataset")
        names = list(map(bare_name, self.texts))
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise SettingError(f"two texts are called {repeated}; rename one, or results cannot tell them apart")
