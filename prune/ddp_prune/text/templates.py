"""The chat template of a tokenizer: conversations in, texts out, and where the assistant's words
are.

To locate the answers, the conversation is rendered once more with a placeholder in the place of
each of them. The text between placeholders is not the assistant's, so the rest is. A template that
strips, splits or drops words does so in the first rendering only, which shows what remains of them.
Where the text between placeholders is found in more than one way, or not at all, the conversation
is rendered once per answer, with one placeholder.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes

from ddp_vllm.errors import TextError, reading

PLACEHOLDER = chr(0x100000)  # a character to which Unicode gives no meaning, nor to the 60,000 after it
THOUGHTS = ("reasoning", "reasoning_content")
"""Keys under which vLLM hands on thoughts to templates."""
UNREADABLE = (TemplateError, TypeError, ValueError)

Message = Mapping[str, Any]
Messages = Sequence[Message]
Tools = Sequence[Any] | None
Span = tuple[int, int]
"""[start, stop) of a text, in characters."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    answers: list[Span]
    """The text that the assistant generates, without the end of its turns."""
    left_out: Sequence[str] = ()
    """Why an answer is none of `answers`, for each of these."""


class ChatTemplate:
    """The chat template of a tokenizer, or none."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.source = str(getattr(tokenizer, "chat_template", None) or "")  # of all, if there are several

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template loops over the parts of a content. vLLM then hands on parts, and joins them for other
        templates; it tells them by their syntax, as here (`_detect_content_format` of its hf.py)."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        with suppress(*UNREADABLE, AttributeError):
            source = self.tokenizer.get_chat_template()
            return _loops_over_parts(_compile_jinja_template(source).environment.parse(source))
        return False

    @cached_property
    def prompt(self) -> str:
        """What the template adds to a conversation so that the model answers; "" if nothing."""
        question = [{"role": "user", "content": "a"}]
        with suppress(*UNREADABLE):
            before, text = self.text(question), self.text(question, prompt=True)
            return text.removeprefix(before) if text.startswith(before) else ""
        return ""

    @cached_property
    def prompted(self) -> str:
        """What the template writes between the words of a user and those of the model; PLACEHOLDER if nothing."""
        with suppress(*UNREADABLE):
            text = self.text([{"role": "user", "content": PLACEHOLDER}], prompt=True)
            return text.rpartition(PLACEHOLDER)[2] or PLACEHOLDER
        return PLACEHOLDER

    def text(
        self,
        messages: Messages,
        tools: Tools = None,
        *,
        prompt: bool = False,
    ) -> str:
        """Return a conversation as text. prompt: add the beginning of an answer.

        Raises: TemplateError if the template rejects the conversation.
        """
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompt}
        return str(self.tokenizer.apply_chat_template(list(messages), tools=tools, **options))

    def render(self, messages: Messages, tools: Tools = None) -> Rendered | TemplateError:
        """Return a conversation as text and where its answers are, or why the template rejects it.

        Raises: TextError if the template fails otherwise.
        """
        if not self.source:
            return TemplateError("the tokenizer has no chat template; put chat_template.jinja into the model's folder")
        name, remedy = f"the chat template of {self.tokenizer.name_or_path}", "repair it, or delete it"
        try:
            with reading(name, TextError, remedy, how=" with this conversation", but=(TemplateError,)):
                return self._rendered(self.text(messages, tools), messages, tools)
        except TemplateError as error:
            return error

    def _rendered(self, text: str, messages: Messages, tools: Tools) -> Rendered:
        """Return where the answers are in the text of a conversation."""
        included = [
            number
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("weight") != 0
        ]
        spans = self._answers(text, messages, included, tools)
        answers, left_out = list[Span](), list[str]()
        for number in included:
            span = spans[number] if spans else self._answer(text, messages, number, tools)
            thoughts = _thoughts_of(messages[number])
            if span is None:
                left_out.append("they cannot be located where the chat template repeats or hides words")
            elif thoughts not in text[slice(*span)] and self._thinks(thoughts, messages[: number + 1], tools):
                left_out.append("the chat template leaves out their thoughts, which a server generates")
            else:
                answers.append(span)
        return Rendered(text, answers, left_out)

    def _thinks(self, thoughts: str, messages: Messages, tools: Tools) -> bool:
        """Tell whether a model with this template thinks before the answer that ends a conversation: the template
        begins thoughts, or renders those of a last turn."""
        if re.search(r"(?<!/)\bthink\W*$", self.prompt, re.IGNORECASE):
            return True
        with suppress(*UNREADABLE):
            return thoughts in self.text(messages, tools)
        return False

    def _answers(self, text: str, messages: Messages, numbers: Sequence[int], tools: Tools) -> dict[int, Span]:
        """Return where each of these messages is in the text, as `_answer` does; {} if one rendering
        does not tell."""
        marks = {number: chr(ord(PLACEHOLDER) + place) for place, number in enumerate(numbers)}
        marked = [_placeholder(turn, marks[n]) if n in marks else turn for n, turn in enumerate(messages)]
        try:
            *parts, rest = re.split(f"[{PLACEHOLDER}-{chr(0x10FFFD)}]", written := self.text(marked, tools))
        except UNREADABLE:
            return {}
        if re.findall(f"[{PLACEHOLDER}-{chr(0x10FFFD)}]", written) != [*marks.values()] or not text.endswith(rest):
            return {}
        starts, end = list[int](), 0  # of the parts
        for part in parts:
            starts.append(text.find(part, end))
            end = starts[-1] + len(part)
        spans, stop = dict[int, Span](), len(text) - len(rest)
        # an answer is located if the parts are found in the same places from both ends
        for number, part, place in zip(numbers[::-1], parts[::-1], starts[::-1], strict=True):
            ending = self.prompted if self.prompted in part else self.prompt or PLACEHOLDER
            _, prompt, blanks = part.rpartition(ending) if part[-1:].isspace() else (part, "known", "")
            if not prompt or (place and not 0 < place == text.rfind(part, 0, stop)):
                return {}
            start = place + len(part) - len(blanks) * blanks.isspace()
            spans[number] = start, _after_blanks(text, stop)
            stop = place
        return spans if stop == 0 else {}

    def _answer(self, text: str, messages: Messages, number: int, tools: Tools) -> Span | None:
        """Return where one assistant's message is in the text; None if it cannot be located."""
        placeholder = _placeholder(messages[number], PLACEHOLDER)
        # some templates reject a result of a tool without its call: then without later turns
        for turns in (messages, messages[: number + 1]):
            with suppress(*UNREADABLE):
                rendered = text if turns is messages else self.text(turns, tools)
                marked = self.text([*turns[:number], placeholder, *turns[number + 1 :]], tools)
                before, after = marked.split(PLACEHOLDER)
                stop = len(rendered) - len(after)
                if rendered.endswith(after) and text.startswith(rendered[:stop]):
                    start = self._start(text[:stop], before, messages[:number], tools)
                    return start, _after_blanks(text, stop)
        return None

    def _start(self, text: str, before: str, earlier: Messages, tools: Tools) -> int:
        """Return where an answer begins that ends `text`.

        The model generates the blanks between the prompt and its words, and also the tags around
        thoughts. Of those, `before`, the text before the placeholder, holds another form.
        """
        start = _shared_length(text, before)
        has_tags = start < len(before) and self.prompt != ""
        with suppress(*UNREADABLE):
            prompt_end = _shared_length(text[:start], self.text(earlier, tools, prompt=True))
            return prompt_end if has_tags or text[prompt_end:start].isspace() else start
        return start


def _loops_over_parts(root: Any) -> bool:
    """Tell whether a template has a loop over the content of a message, or over a macro's parameter
    that is one."""

    def reads(node: Any, name: str, key: str = "") -> bool:
        while isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        if key:
            field = node.attr if isinstance(node, nodes.Getattr) else getattr(getattr(node, "arg", None), "value", "")
            return field == key and reads(node.node, name)
        return isinstance(node, nodes.Name) and node.name == name

    def is_content(node: Any) -> bool:
        return any(reads(node, turn, "content") for turn in turns)

    lists, loops, in_macros = ["messages"], [*root.find_all(nodes.For)], dict[int, set[str]]()
    for name in lists:  # it grows
        assigned = [node.target.name for node in root.find_all(nodes.Assign) if reads(node.node, name)]
        lists += [target for target in assigned if target not in lists]
    turns = [loop.target.name for loop in loops if any(reads(loop.iter, name) for name in lists)]
    for macro in root.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        calls = [call for call in root.find_all(nodes.Call) if reads(call.node, macro.name)]
        given = [pair for call in calls for pair in zip(names, call.args, strict=False)]
        given += [(word.key, word.value) for call in calls for word in call.kwargs]
        contents = {name for name, value in given if is_content(value)}
        in_macros |= dict.fromkeys(map(id, macro.find_all(nodes.For)), contents)
    return any(
        is_content(loop.iter)
        or (isinstance(loop.iter, nodes.Name) and loop.iter.name in in_macros.get(id(loop), {"content"}))
        for loop in loops
    )


def _placeholder(message: Message, mark: str) -> Message:
    """Return an assistant's message with a mark in the place of its words, thoughts and calls."""
    content = [{"type": "text", "text": mark}] if isinstance(message.get("content"), list) else mark
    return {"role": "assistant", "content": content}


def texts_of(message: Message) -> list[str]:
    """Return the texts of the parts of a message."""
    content = message["content"]
    return [part["text"] for part in content] if isinstance(content, list) else [content]


def words_of(message: Message) -> str:
    """Return the text of a message."""
    return "\n".join(texts_of(message))


def _after_blanks(text: str, stop: int) -> int:
    """Return where the blanks end that begin at a place of a text."""
    return len(text) - len(text[stop:].lstrip())


def _shared_length(one: str, other: str) -> int:
    """Return how many characters the beginnings of two texts share."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda end: one[: end + 1] != other[: end + 1])


def _thoughts_of(message: Message) -> str:
    """Return the thoughts of an assistant's message; "" if it has none."""
    thoughts = message.get(THOUGHTS[0]) or words_of(message).rpartition("</think>")[0].rpartition("<think>")[2]
    return str(thoughts).strip()


def leading_bos(tokenizer: Any) -> list[int]:
    """Return [BOS] if the tokenizer begins every text with it, else []."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("x")["input_ids"][:1] == [bos] else []
