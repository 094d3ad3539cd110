"""Copies of a model with one file changed, and text of which no token is kept."""

import shutil
from pathlib import Path
from typing import Any

from commands import edit_json

CHINESE, EMOJI = "你好，世界", "naïve \U0001f469\u200d\U0001f680 é"


def edited(dense: Path, folder: Path, name: str, **changes: Any) -> Path:
    """Copy a model and change one of its files."""
    return edit_json(shutil.copytree(dense, folder) / name, **changes).parent
