"""The chat template of a tokenizer: conversations in, texts out, and where the assistant's words
are.

To locate an answer, the conversation is rendered once more with a placeholder in the place of that
message. The text before and after the placeholder is not the assistant's, so the rest is. A
template that strips, splits or drops words does so in the first rendering only, which shows what
remains of them. Long conversations are rendered once per answer.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError

from ddp_vllm.errors import TextError

PLACEHOLDER = chr(0x100000)  # a character to which Unicode gives no meaning
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
UNREADABLE = (TemplateError, TypeError, ValueError)

Message = Mapping[str, Any]


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    answers: list[tuple[int, int]] | None
    """[start, stop) of the text that the assistant generates, in characters, without the end of its
    turns. Empty if the words cannot be located, because the template repeats or hides them. None if
    no assistant takes part."""


class ChatTemplate:
    """The chat template of a tokenizer, or none."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.source = ""
        if tokenizer.chat_template:
            with suppress(ValueError):  # several templates, none of which is the default
                self.source = tokenizer.get_chat_template()
                with suppress(ValueError):  # with tools, transformers may take another
                    self.source += tokenizer.get_chat_template(tools=[{}])

    def reads(self, key: str) -> bool:
        """Tell whether the template mentions a key of messages."""
        return re.search(rf"\b{re.escape(key)}\b", self.source) is not None

    def knows(self, role: str) -> bool:
        """Tell whether the template mentions a role."""
        return f"'{role}'" in self.source or f'"{role}"' in self.source

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template renders contents that are lists of parts."""
        with suppress(TemplateError, TypeError):
            text = self.text([{"role": "user", "content": [{"type": "text", "text": "a~b"}]}])
            return "a~b" in text and "'text'" not in text
        return False

    @cached_property
    def prompt(self) -> str:
        """What the template adds to a conversation so that the model answers; "" if nothing."""
        question = [{"role": "user", "content": "a"}]
        with suppress(TemplateError):
            before, text = self.text(question), self.text(question, prompt=True)
            return text.removeprefix(before) if text.startswith(before) else ""
        return ""

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = False,
    ) -> str:
        """Return a conversation as text. prompt: add the beginning of an answer.

        Raises: TemplateError if the template rejects the conversation.
        """
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompt}
        return str(self.tokenizer.apply_chat_template(list(messages), tools=tools, **options))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, place: str = ""
    ) -> Rendered | TemplateError:
        """Return a conversation as text and where its answers are, or why the template rejects it.

        place: of the conversation, for messages. Raises: TextError if the template fails otherwise.
        """
        try:
            text = self.text(messages, tools)
            return Rendered(text, self._answers(text, messages, tools))
        except TemplateError as error:
            return error
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise TextError(
                f"the chat template of {self.tokenizer.name_or_path} fails on "
                f"{place or 'a question'} ({reason}); repair the template, or delete it"
            ) from error

    def _answers(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> list[tuple[int, int]] | None:
        """Return where the answers are in the text of a conversation, as in `Rendered`."""
        numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        answers = list[tuple[int, int]]()
        for number in numbers:
            message = messages[number]
            if message.get("weight") != 0 and message.get("train") is not False:
                span = self._answer(text, messages, number, tools)
                # a template without calls of tools writes None for a message that is only a call
                is_none = message.get("content") is None and span and text[slice(*span)] == "None"
                if span and not is_none:
                    answers.append(span)
        return answers if numbers else None

    def _answer(
        self, text: str, messages: Sequence[Message], number: int, tools: Sequence[Any] | None
    ) -> tuple[int, int] | None:
        """Return where one assistant's message is in the text; None if it cannot be located."""
        content: Any = PLACEHOLDER
        if isinstance(messages[number].get("content"), list):
            content = [{"type": "text", "text": PLACEHOLDER}]
        placeholder = {"role": "assistant", "content": content}
        # some templates reject a result of a tool without its call: then without later turns
        for turns in (messages, messages[: number + 1]):
            with suppress(*UNREADABLE):
                rendered = text if turns is messages else self.text(turns, tools)
                marked = self.text([*turns[:number], placeholder, *turns[number + 1 :]], tools)
                before, after = marked.split(PLACEHOLDER)
                stop = len(rendered) - len(after)
                if rendered.endswith(after) and text.startswith(rendered[:stop]):
                    start = self._start(text[:stop], before, messages[:number], tools)
                    blanks = len(text[stop:]) - len(text[stop:].lstrip())
                    return start, stop + blanks
        return None

    def _start(self, text: str, before: str, earlier: Sequence[Message], tools: Sequence[Any] | None) -> int:
        """Return where an answer begins that ends `text`.

        The model generates the blanks between the prompt and its words, and also the tags around
        thoughts. Of those, `before`, the text before the placeholder, holds another form.
        """
        start = len(os.path.commonprefix([text, before]))  # noqa: RUF071
        has_tags = start < len(before) and self.prompt != ""
        if self.prompt and not has_tags and before.endswith(self.prompt):
            return start
        with suppress(*UNREADABLE):
            prompt = self.text(earlier, tools, prompt=True)
            prompt_end = len(os.path.commonprefix([text[:start], prompt]))  # noqa: RUF071
            return prompt_end if has_tags or text[prompt_end:start].isspace() else start
        return start
