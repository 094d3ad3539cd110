"""The chat template of a tokenizer: conversations in, texts out, and where the assistant's words
are.

To locate an assistant's words in the rendered text, a conversation is rendered twice: as it is, and
with the first and last character of each part of an assistant's message replaced by a placeholder
for that message. Parts are separated by the tags that the template mentions, such as <think>. A
template that strips, splits or drops parts does so both times, so the placeholders show where the
words are.
"""

import itertools
import json
import os
import re
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError

from ddp_vllm.errors import TextError

PLACEHOLDERS = range(0x100000, 0x10FFFE)
"""Characters to which Unicode gives no meaning."""
_PLACEHOLDER = re.compile(f"[{chr(PLACEHOLDERS[0])}-{chr(PLACEHOLDERS[-1])}]")
_TAG = re.compile(r"<[^<>'\"{}%\s]+>|\[/?[A-Z_]+\]")
"""A tag in the source of a template: <think>, [THINK]."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MAX_TURN_END = 200  # characters between an assistant's last word and the end of its turn

Message = Mapping[str, Any]


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    answers: list[tuple[int, int]] | None
    """[start, stop) of the text that the assistant generates, in characters, without the end of its
    turns. Empty if the words cannot be located, because the template changes them otherwise than by
    stripping, splitting or dropping. None if no assistant takes part."""


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
        tags = sorted(set(_TAG.findall(self.source)))
        self.tag = re.compile("|".join(map(re.escape, tags)) or "(?!)")  # (?!) matches nothing

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

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, prompt: bool = False) -> str:
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
                f"the chat template of {self.tokenizer.name_or_path} fails on {place or 'a question'} "
                f"({reason}); repair the template, or delete it"
            ) from error

    @cached_property
    def prompt(self) -> str:
        """What the template adds to a conversation so that the model answers; "" if nothing."""
        question = [{"role": "user", "content": "a"}]
        with suppress(TemplateError):
            before, text = self.text(question), self.text(question, prompt=True)
            return text.removeprefix(before) if text.startswith(before) else ""
        return ""

    @cached_property
    def edges(self) -> tuple[str, str]:
        """The blanks before an answer that belong to its prompt, and the text that ends its
        turn."""
        question, answer = [{"role": "user", "content": "a"}], chr(PLACEHOLDERS[0])
        with suppress(TemplateError):
            rendered = self.text([*question, {"role": "assistant", "content": answer}])
            before, _, after = rendered.partition(answer)
            prompt = self.text(question, prompt=True)
            given = prompt if prompt.rstrip() == before.rstrip() else before
            return given[len(given.rstrip()) :], after.strip()
        return "", ""

    def _answers(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> list[tuple[int, int]] | None:
        """Return where the assistant's answers are in the text of a conversation, as in
        `Rendered`."""
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not numbers:
            return None
        for with_calls in (True, False):
            marked, outer_tags = list(messages), dict[str, tuple[str, str]]()
            for number in numbers:
                sign = chr(PLACEHOLDERS[number % len(PLACEHOLDERS)])
                marked[number], outer_tags[sign] = self._mark(messages[number], sign, with_calls)
            with suppress(TemplateError, TypeError, ValueError):
                other = self.text(marked, tools)
                given = json.dumps(marked, ensure_ascii=False, default=str)
                is_repeated = any(other.count(sign) > given.count(sign) for sign in outer_tags)
                spans = {} if is_repeated else _spans(text, other, outer_tags)
                if spans:
                    break
        else:
            return []
        answers, done = list[tuple[int, int]](), 0
        for sign, (start, stop) in spans.items():
            number = ord(sign) - PLACEHOLDERS[0]
            message = messages[number]
            start, stop = max(start, done), max(stop, done)
            before, after = outer_tags[sign]
            if before and (tags := re.compile(before + r"\s*\Z").search(text, done, start)):
                start = tags.start()
            blanks = text[done + len(text[done:start].rstrip()) : start]
            start -= len(blanks) - len(os.path.commonprefix([blanks, self.edges[0]]))  # noqa: RUF071
            if following := re.compile(rf"\s*(?:{after}\s*)?").match(text, stop):
                stop = following.end()
            if any(message.get(key) for key in ("tool_calls", *THOUGHTS)):
                start, stop = self._widen(text, done, start, stop, messages[number + 1 : number + 2])
            if message.get("weight") != 0 and message.get("train") is not False:
                answers.append((start, stop))
            done = stop
        return answers

    def _widen(self, text: str, done: int, start: int, stop: int, following: Sequence[Message]) -> tuple[int, int]:
        """Widen a span to what the template writes around calls and thoughts, such as <tool_call>.

        The model generates it too: from the end of the prompt for an answer to the end of the turn.
        """
        header = self.prompt.rstrip()
        if header and (at := text.rfind(header, done, start)) >= 0:
            blanks = self.prompt[len(header) :]
            at += len(header)
            start = at + len(os.path.commonprefix([text[at:start], blanks]))  # noqa: RUF071
        end = self.edges[1]
        if end and 0 <= (at := text.find(end, stop)) <= stop + MAX_TURN_END:
            words = next((str(message.get("content") or "") for message in following), "").strip()
            if not words or words not in text[stop:at]:
                stop = at
        return start, stop

    def _mark(self, message: Message, sign: str, with_calls: bool) -> tuple[Message, tuple[str, str]]:
        """Return an assistant's message with placeholders, and patterns of its content's outer
        tags."""
        marked, edges = dict(message), ("", "")
        if isinstance(content := message.get("content"), str):
            marked["content"], *tags = self._replace(content, sign)
            edges = tags[0], tags[1]
        elif isinstance(content, list):
            marked["content"] = [{**part, "text": self._replace(part["text"], sign)[0]} for part in content]
        if with_calls:
            for key in THOUGHTS:
                if isinstance(words := message.get(key), str):
                    marked[key] = self._replace(words, sign)[0]
            if isinstance(calls := message.get("tool_calls"), list):
                marked["tool_calls"] = [_marked_call(call, sign) for call in calls]
        return marked, edges

    def _replace(self, content: str, sign: str) -> tuple[str, str, str]:
        """Return words with the outer characters of their parts replaced, and the outer tags'
        patterns."""
        parts, tags = self.tag.split(content), [*self.tag.findall(content), ""]
        filled = [index for index, part in enumerate(parts) if part.strip()] or [0]
        edges = tags[: filled[0]], tags[filled[-1] : -1]
        replaced = (re.sub(r"\A(\s*)\S|\S(?=\s*\Z)", rf"\g<1>{sign}", part) for part in parts)
        before, after = (r"\s*".join(map(re.escape, outer_tags)) for outer_tags in edges)
        return "".join(itertools.chain.from_iterable(zip(replaced, tags, strict=True))), before, after


def _marked_call(call: Any, sign: str) -> Any:
    """Return a call of a tool with placeholders in its name and its arguments."""
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _marked_call(function, sign)}
    return {
        key: _marked_words(value, sign) if key in ("name", "arguments", "parameters") else value
        for key, value in call.items()
    }


def _marked_words(value: Any, sign: str) -> Any:
    """Return nested words with placeholders at their outer characters, unless JSON would escape
    those."""
    if isinstance(value, dict):
        return {key: _marked_words(item, sign) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked_words(item, sign) for item in value]
    if not isinstance(value, str) or not value or {value[0], value[-1]} & set("\"\\\n\r\t<>&'"):
        return value
    return sign + value[1:-1] + sign * (len(value) > 1)


def _spans(text: str, other: str, signs: Container[str]) -> dict[str, tuple[int, int]]:
    """Return where the words of each message are in `text`; `other` is the same text with
    placeholders.

    Returns {} if the two differ in more than the placeholders.
    """
    if len(text) != len(other):
        return {}
    if _PLACEHOLDER.sub(lambda match: text[match.start()], other) != text:
        return {}
    spans = dict[str, tuple[int, int]]()
    for match in _PLACEHOLDER.finditer(other):
        sign, index = match[0], match.start()
        if sign in signs and text[index] != sign:
            spans[sign] = spans.get(sign, (index, index))[0], index + 1
    return spans
