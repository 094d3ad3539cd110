"""Chat templates, rendered in a child process with limits of time and memory.

A template is a program by the publisher of the model: it may loop forever, or spend hours in one step that no signal
interrupts. `Templates` starts this file as a program, sends it batches of conversations and reads the rendered texts.
The program imports only the standard library and jinja2, so it starts in a tenth of a second.

To locate an assistant's words in the rendered text, a conversation is rendered twice: as it is, and with the first and
last character of each part of an assistant's message replaced by a placeholder for that message. Parts are separated by
the tags that the template mentions, such as <think>. A template that strips, splits or drops parts does so both times,
so the placeholders show where the words are.
"""

import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDERING_SECONDS, SECONDS_PER_CONVERSATION = 10.0, 0.01
"""Processor time that a chat template may take: a base, plus a time per conversation (real templates take a tenth)."""
RENDERING_BYTES = 1 << 29
"""Memory that rendering a batch may take."""
PLACEHOLDERS = range(0x100000, 0x10FFFE)
"""Characters to which Unicode gives no meaning."""
_PLACEHOLDER = re.compile(f"[{chr(PLACEHOLDERS[0])}-{chr(PLACEHOLDERS[-1])}]")

_TAG = re.compile(r"<[^<>'\"{}%\s]+>|\[/?[A-Z_]+\]")
"""A tag in the source of a template: <think>, [THINK]."""

Message = Mapping[str, str]


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    answers: list[tuple[int, int]] | None
    """[start, stop) of the text that the assistant generates, in characters, without the end of its turns. Empty if the
    words cannot be located, because the template changes them otherwise than by stripping, splitting or dropping. None
    if no assistant takes part."""


class Templates:
    """The chat template of a tokenizer, rendered by one child process that ends with the `with` block.

    The process starts with the first conversation.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.count = tokenizer, 0
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process:
            self.process.kill()
            self.process.communicate()

    def render(
        self, conversations: Sequence[Sequence[Message]], *, add_generation_prompt: bool = False
    ) -> list[Rendered | None]:
        """Return each conversation as text; None if the template rejects its roles or their order.

        Raises: TextError if the template fails otherwise, or exceeds its time or memory.
        """
        self.count += len(conversations)
        seconds = RENDERING_SECONDS + SECONDS_PER_CONVERSATION * self.count
        request = {"conversations": conversations, "add_generation_prompt": add_generation_prompt, "seconds": seconds}
        process = self.process = self.process or self._start()
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        if line := process.stdout.readline():
            reply: dict[str, Any] = json.loads(line)
            if "error" in reply:
                raise self._error(reply["error"])
            return [each and Rendered(*each) for each in reply["rendered"]]
        status = process.wait()
        timed_out = status == -signal.SIGXCPU
        raise self._error(f"it takes more than {seconds:.3g} s" if timed_out else f"its process ended with {status}")

    def _start(self) -> "subprocess.Popen[bytes]":
        try:
            template = self.tokenizer.get_chat_template()
        except ValueError as error:
            raise self._error(str(error)) from error
        process = subprocess.Popen(
            [sys.executable, "-P", __file__],  # -P: modules are not looked up in the folder of this file
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the child
        )  # fmt: skip
        setup = {"template": template, "special_tokens": self.tokenizer.special_tokens_map, "bytes": RENDERING_BYTES}
        assert process.stdin
        process.stdin.write(json.dumps(setup, default=str).encode() + b"\n")
        return process

    def _error(self, reason: str) -> Exception:
        from ddp_vllm.errors import TextError  # not at the top: the child process does not need it

        reason = " ".join(reason.split())[:200]
        return TextError(
            f"the chat template of {self.tokenizer.name_or_path} fails ({reason}); repair it, or delete it"
        )


class _Generation(Extension):
    """The block with which some templates mark an assistant's words for transformers."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 types it)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment in which transformers compiles templates."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **keys: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **keys)

    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Template:
    """A compiled template that also locates the assistant's words."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self.special_tokens = source, special_tokens
        tags = sorted(set(_TAG.findall(source)))
        self.tag = re.compile("|".join(map(re.escape, tags)) or "(?!)")  # (?!) matches nothing

    @cached_property
    def compiled(self) -> Any:
        return _environment().from_string(self.source)

    def text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return a conversation as text. Raises: TemplateError."""
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        return str(self.compiled.render(**given, **self.special_tokens))

    @cached_property
    def blanks(self) -> str:
        """The blanks before an answer that belong to its prompt."""
        question, answer = [{"role": "user", "content": "a"}], chr(PLACEHOLDERS[0])
        with suppress(TemplateError):
            before = self.text([*question, {"role": "assistant", "content": answer}]).partition(answer)[0]
            prompt = self.text(question, add_generation_prompt=True)
            given = prompt if prompt.rstrip() == before.rstrip() else before
            return given[len(given.rstrip()) :]
        return ""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> Rendered | None:
        """Return a conversation as text and where its answers are; None if the template rejects it."""
        try:
            text = self.text(messages, add_generation_prompt)
            return Rendered(text, self._answers(text, messages))
        except TemplateError:
            return None

    def _answers(self, text: str, messages: Sequence[Message]) -> list[tuple[int, int]] | None:
        """Return where the assistant's answers are in the text of a conversation, as in `Rendered`."""
        replaced, edges = list(messages), dict[str, tuple[str, str]]()
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                sign = chr(PLACEHOLDERS[number % len(PLACEHOLDERS)])
                content, before, after = self._replace(message["content"], sign)
                edges[sign] = before, after
                replaced[number] = {**message, "content": content}
        if not edges:
            return None
        other, contents = self.text(replaced), "".join(message["content"] for message in replaced)
        if any(other.count(sign) > contents.count(sign) for sign in edges):
            return []  # the template repeats words
        answers, done = list[tuple[int, int]](), 0
        for sign, (start, stop) in _spans(text, other, edges).items():
            before, after = edges[sign]
            start, stop = max(start, done), max(stop, done)
            if before and (tags := re.compile(before + r"\s*\Z").search(text, done, start)):
                start = tags.start()
            blanks = text[done + len(text[done:start].rstrip()) : start]
            start -= len(blanks) - len(os.path.commonprefix([blanks, self.blanks]))  # noqa: RUF071
            if following := re.compile(rf"\s*(?:{after}\s*)?").match(text, stop):
                stop = following.end()
            answers.append((start, stop))
            done = stop
        return answers

    def _replace(self, content: str, sign: str) -> tuple[str, str, str]:
        """Return a message with the outer characters of its parts replaced, and patterns of the outer tags."""
        parts, tags = self.tag.split(content), [*self.tag.findall(content), ""]
        filled = [index for index, part in enumerate(parts) if part.strip()] or [0]
        edges = tags[: filled[0]], tags[filled[-1] : -1]
        replaced = (re.sub(r"\A(\s*)\S|\S(?=\s*\Z)", rf"\g<1>{sign}", part) for part in parts)
        before, after = (r"\s*".join(map(re.escape, outer_tags)) for outer_tags in edges)
        return "".join(itertools.chain.from_iterable(zip(replaced, tags, strict=True))), before, after


def _spans(text: str, other: str, signs: Container[str]) -> dict[str, tuple[int, int]]:
    """Return where the words of each message are in `text`; `other` is the same text with placeholders.

    Returns {} if the two differ in more than the placeholders.
    """
    if len(text) != len(other) or _PLACEHOLDER.sub(lambda found: text[found.start()], other) != text:
        return {}
    spans = dict[str, tuple[int, int]]()
    for found in _PLACEHOLDER.finditer(other):
        sign, index = found[0], found.start()
        if sign in signs and text[index] != sign:
            spans[sign] = spans.get(sign, (index, index))[0], index + 1
    return spans


def _replies(requests: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the reply to each request of `Templates`; the first line sets up the template."""
    setup = json.loads(next(requests))
    template = _Template(setup["template"], setup["special_tokens"])
    with suppress(OSError):  # without /proc, memory is not limited
        size = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, size + setup["bytes"])
    _limit(resource.RLIMIT_CORE, 0)
    for line in requests:
        try:
            request = json.loads(line)
            _limit(resource.RLIMIT_CPU, math.ceil(request["seconds"]))
            prompt = request["add_generation_prompt"]
            yield {"rendered": [template.render(messages, prompt) for messages in request["conversations"]]}
        except MemoryError:
            yield {"error": f"it takes more than {setup['bytes'] >> 20} MB of memory"}
        except Exception as error:
            yield {"error": str(error) or type(error).__name__}


def _limit(kind: int, most: int) -> None:
    """Limit a resource of this process, at most to its hard limit."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    for reply in _replies(iter(sys.stdin.buffer)):
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
