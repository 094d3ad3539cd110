"""The tiny models and the text of the training core's tests, and its `runs`."""

import importlib.util
import sys
from pathlib import Path

CORE = Path(__file__).parents[1] / "prune"
sys.path.append(str(CORE))
_spec = importlib.util.spec_from_file_location("core_conftest", CORE / "conftest.py")
assert _spec and _spec.loader
_core = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_core)
short_answers, tiny_text, tiny_model = _core.short_answers, _core.tiny_text, _core.tiny_model
tiny_experts, pruned, no_pictures = _core.tiny_experts, _core.pruned, _core.no_pictures
load, tokenizer, write_texts = _core.load, _core.tokenizer, _core.write_texts
