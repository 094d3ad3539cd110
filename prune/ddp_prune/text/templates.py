"""The chat template of a tokenizer: conversations in, texts out, and where the assistant's words
are.

To locate an answer, the conversation is rendered once more with a placeholder in the place of that
message. The text before and after the placeholder is not the assistant's, so the rest is. A
template that strips, splits or drops words does so in the first rendering only, which shows what
remains of them. Long conversations are rendered once per answer.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes

from ddp_vllm.errors import TextError, reading

PLACEHOLDER = chr(0x100000)  # a character to which Unicode gives no meaning
THOUGHTS = ("reasoning", "reasoning_content")
"""Keys under which vLLM hands on thoughts to templates."""
UNREADABLE = (TemplateError, TypeError, ValueError)

Message = Mapping[str, Any]


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    answers: list[tuple[int, int]] | None
    """[start, stop) of the text that the assistant generates, in characters, without the end of its
    turns. None if no assistant takes part."""
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

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered | TemplateError:
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

    def _rendered(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> Rendered:
        """Return where the answers are in the text of a conversation."""
        numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        answers, left_out = list[tuple[int, int]](), list[str]()
        for number in (n for n in numbers if messages[n].get("weight") != 0):
            span = self._answer(text, messages, number, tools)
            thoughts = _thoughts_of(messages[number])
            if span is None:
                left_out.append("they cannot be located where the chat template repeats or hides words")
            elif thoughts not in text[slice(*span)] and self._thinks(thoughts, messages[: number + 1], tools):
                left_out.append("the chat template leaves out their thoughts, which a server generates")
            else:
                answers.append(span)
        return Rendered(text, answers if numbers else None, left_out)

    def _thinks(self, thoughts: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
        """Tell whether a model with this template thinks before the answer that ends a conversation: the template
        begins thoughts, or renders those of a last turn."""
        if re.search(r"(?<!/)\bthink\W*$", self.prompt, re.IGNORECASE):
            return True
        with suppress(*UNREADABLE):
            return thoughts in self.text(messages, tools)
        return False

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


def texts_of(message: Message) -> list[str]:
    """Return the texts of the parts of a message."""
    content = message["content"]
    return [part["text"] for part in content] if isinstance(content, list) else [content]


def words_of(message: Message) -> str:
    """Return the text of a message."""
    return "\n".join(texts_of(message))


def _shared_length(one: str, other: str) -> int:
    """Return how many characters the beginnings of two texts share."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda end: one[: end + 1] != other[: end + 1])


def _thoughts_of(message: Message) -> str:
    """Return the thoughts of an assistant's message; "" if it has none."""
    thoughts = message.get(THOUGHTS[0]) or words_of(message).rpartition("</think>")[0].rpartition("<think>")[2]
    return str(thoughts).strip()
