"""Renders conversations as vLLM's /v1/chat/completions does, without an engine: MODEL JOBS RESULTS.

A job is a chat template with a request. A result is the text, or null if vLLM rejects the request.
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

MODEL, JOBS, RESULTS = sys.argv[1:]
CONFIG = ModelConfig(model=MODEL, dtype="float32")
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


def render(template: str, request: dict[str, Any]) -> str:
    """The steps of `OnlineRenderer.render_chat` and `HfRenderer.render_messages`."""
    asked = ChatCompletionRequest(model="m", **request)
    asked.add_generation_prompt = False
    tools = [tool.model_dump() for tool in asked.tools] if asked.tools else None
    params = asked.build_chat_params(template, "auto").with_defaults({"tools": tools, "tokenize": False})
    options = params.get_apply_chat_template_kwargs()
    shared = {"chat_template": template, "tools": tools, "tokenizer": TOKENIZER, "model_config": CONFIG}
    content_format = resolve_chat_template_content_format(given_format="auto", **shared)
    conversation, _, _ = parse_chat_messages(asked.messages, CONFIG, content_format)
    return str(safe_apply_chat_template(CONFIG, TOKENIZER, conversation, **options))


def text_of(template: str, request: dict[str, Any]) -> str | None:
    try:
        return render(template, request)
    except (ValueError, VLLMValidationError) as error:
        print(" ".join(str(error).split())[:300])
        return None


Path(RESULTS).write_text(json.dumps([text_of(*job) for job in json.loads(Path(JOBS).read_text())]))
