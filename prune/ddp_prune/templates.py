"""Chat templates, rendered in a process of their own, which is killed where a template takes too long.

A template is a program of whoever made the model: it may loop for ever, or spend hours in one step that no signal
interrupts. `Templates` starts this file as a program, sends it conversations in batches and reads their texts. The
program imports the standard library and jinja2 alone, so it starts in a tenth of a second.

To tell which characters are an assistant's, a conversation is rendered twice: as it is, and with the first and the last
character of each part of an assistant's turn replaced by one that stands for the turn. Parts lie between the tags that
the template names, as <think>. A template that strips, splits or drops parts of a turn does the same both times, so the
replaced characters lie where the words are.
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
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END = "\ufdd0", "\ufdd1"
"""Around an assistant's words in a rendered conversation; Unicode reserves both for a program's own use."""
LONGEST_RENDERING = 10.0
"""Seconds of processor time that a chat template may take for all conversations of a reading, in addition to:"""
SECONDS_PER_CONVERSATION = 0.01
"""Real templates take a tenth of that."""
LARGEST_RENDERING = 1 << 29
"""Bytes of memory that rendering a batch may take."""
TURNS = range(0x100000, 0x10FFFE)
"""Characters that stand for the words of a turn; Unicode gives them no meaning."""

_TAG = re.compile(r"<[^<>'\"{}%\s]+>|\[/?[A-Z_]+\]")
"""What a template may look for in a turn, in its source: <think>, [THINK]."""

Message = Mapping[str, str]


class Templates:
    """The chat template of a tokenizer, rendered by one process, which ends with the block.

    In a Python `with` block. The process starts with the first conversation.
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
        self, conversations: Sequence[Sequence[Message]], *, mark: bool = False, add_generation_prompt: bool = False
    ) -> list[str | None]:
        """Return each conversation as the template arranges it; None where it refuses the roles or their order.

        mark: put BEGIN and END around what the assistant generates. Raises: TextError if the template fails otherwise,
        or takes more than its share of time or memory.
        """
        self.count += len(conversations)
        allowed = LONGEST_RENDERING + SECONDS_PER_CONVERSATION * self.count
        request = {"conversations": conversations, "mark": mark, "prompt": add_generation_prompt, "seconds": allowed}
        process = self.process = self.process or self._start()
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        if line := process.stdout.readline():
            reply: dict[str, Any] = json.loads(line)
            if "texts" in reply:
                return list(reply["texts"])
            raise self._error(reply["error"])
        ended = process.wait()
        raise self._error(
            f"it takes more than {allowed:.3g} s" if ended == -signal.SIGXCPU else f"it ended its process with {ended}"
        )

    def _start(self) -> "subprocess.Popen[bytes]":
        try:
            template = self.tokenizer.get_chat_template()
        except ValueError as error:
            raise self._error(str(error)) from error
        process = subprocess.Popen(
            [sys.executable, "-P", __file__],  # without the folder of this file among the modules
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the other
        )  # fmt: skip
        given = {"template": template, "names": self.tokenizer.special_tokens_map, "bytes": LARGEST_RENDERING}
        assert process.stdin
        process.stdin.write(json.dumps(given, default=str).encode() + b"\n")
        return process

    def _error(self, reason: str) -> Exception:
        from ddp_vllm.errors import TextError  # which the program does not need

        reason = " ".join(reason.split())[:200]
        return TextError(
            f"the chat template of {self.tokenizer.name_or_path} fails ({reason}); repair it, or delete it"
        )


class _Generation(Extension):
    """The block with which some templates name an assistant's words to transformers."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 types it)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return what transformers compiles templates with."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **keys: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **keys)

    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Template:
    """A template, and where in a conversation that it arranged the assistant's words are."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self.source, self.names = source, names
        self.tag = re.compile("|".join(map(re.escape, sorted({*_TAG.findall(source), END}))))

    @cached_property
    def compiled(self) -> Any:
        return _environment().from_string(self.source)

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """Return a conversation; with `prompt`, the text after which an answer is generated. Raises: TemplateError."""
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": prompt}
        return str(self.compiled.render(**given, **self.names))

    @cached_property
    def blanks(self) -> str:
        """The blanks before an answer that belong to its prompt."""
        asked, answer = [{"role": "user", "content": "a"}], chr(TURNS[0])
        with suppress(TemplateError):
            before = self.render([*asked, {"role": "assistant", "content": answer}]).partition(answer)[0]
            prompt = self.render(asked, prompt=True)
            given = prompt if prompt.rstrip() == before.rstrip() else before
            return given[len(given.rstrip()) :]
        return ""

    def marked(self, messages: Sequence[Message]) -> str:
        """Return a conversation with BEGIN and END around what the assistant generates, except the end of its turns.

        Nothing lies between marks if the template does more to the words than to strip, split or drop them.
        """
        text, replaced, turns = self.render(messages), list(messages), dict[str, tuple[str, str]]()
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                sign = chr(TURNS[number % len(TURNS)])
                content, before, after = self._replace(message["content"], sign)
                turns[sign] = before, after
                replaced[number] = {**message, "content": content}
        if not turns:
            return text
        other, contents = self.render(replaced), "".join(message["content"] for message in replaced)
        once = all(other.count(sign) <= contents.count(sign) for sign in turns)
        pieces, done = [END], 0
        for sign, (start, stop) in _spans(text, other, turns).items() if once else ():
            start, stop, (before, after) = max(start, done), max(stop, done), turns[sign]
            if before and (tags := re.compile(before + r"\s*\Z").search(text, done, start)):
                start = tags.start()
            blanks = text[done + len(text[done:start].rstrip()) : start]
            start -= len(blanks) - len(os.path.commonprefix([blanks, self.blanks]))  # noqa: RUF071
            tags = re.compile(rf"\s*{after}\s*").match(text, stop) or re.compile(r"\s*").match(text, stop)
            stop = tags.end() if tags else stop
            pieces += [text[done:start], BEGIN, text[start:stop], END]
            done = stop
        return "".join([*pieces, text[done:]])

    def _replace(self, content: str, sign: str) -> tuple[str, str, str]:
        """Return a turn with the outer characters of each part replaced; and patterns of the tags before and after."""
        parts, tags = self.tag.split(content), [*self.tag.findall(content), ""]
        full = [place for place, part in enumerate(parts) if part.strip()] or [0]
        edges = tags[: full[0]], tags[full[-1] : -1]
        replaced = (re.sub(r"\A(\s*)\S|\S(?=\s*\Z)", rf"\g<1>{sign}", part) for part in parts)
        before, after = (r"\s*".join(map(re.escape, some)) for some in edges)
        return "".join(itertools.chain.from_iterable(zip(replaced, tags, strict=True))), before, after


def _spans(text: str, other: str, turns: Container[str]) -> dict[str, tuple[int, int]]:
    """Return where the words of each turn are in a text, by another in which their outer characters are replaced."""
    spans, restored, done = dict[str, tuple[int, int]](), list[str](), 0
    for found in re.finditer(f"[{chr(TURNS[0])}-{chr(TURNS[-1])}]", other):
        place, sign = found.start(), found[0]
        restored += [other[done:place], text[place : place + 1]]
        done = place + 1
        if sign in turns and text[place : place + 1] != sign:
            spans[sign] = spans.get(sign, (place, done))[0], done
    return spans if "".join([*restored, other[done:]]) == text else {}


def _replies(requests: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the reply to each request of `Templates`; the first line is the template."""
    given = json.loads(next(requests))
    template = _Template(given["template"], given["names"])
    with suppress(OSError):  # where the system tells no sizes, it limits none
        size = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, size + given["bytes"])
    _limit(resource.RLIMIT_CORE, 0)
    for line in requests:
        try:
            request = json.loads(line)
            _limit(resource.RLIMIT_CPU, math.ceil(request["seconds"]))
            arrange = template.marked if request["mark"] else partial(template.render, prompt=request["prompt"])
            yield {"texts": [_unless_refused(arrange, messages) for messages in request["conversations"]]}
        except MemoryError:
            yield {"error": f"it takes more than {given['bytes'] >> 20} MB of memory"}
        except Exception as error:
            yield {"error": str(error) or type(error).__name__}


def _limit(kind: int, most: int) -> None:
    """Set what this process may take, as far as it may set it."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _unless_refused(arrange: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str | None:
    try:
        return arrange(messages)
    except TemplateError:
        return None


if __name__ == "__main__":
    for reply in _replies(iter(sys.stdin.buffer)):
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
