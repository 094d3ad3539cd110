"""Rows in, documents out: texts, and conversations by the chat template with their loss mask."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from jinja2 import TemplateError

from ddp_prune.text.conversations import Conversation, RowParser
from ddp_prune.text.messages import Message, Notes, at
from ddp_prune.text.rows import Row, open_rows, reading_text
from ddp_prune.text.templates import ChatTemplate, Rendered, texts_of, words_of
from ddp_vllm.errors import TextError


@dataclass(frozen=True)
class Document:
    """A text, and which of its characters contribute to the loss."""

    text: str
    loss_mask: np.ndarray | None = None
    """bool [num_characters]; None: all characters, and the EOS after the text."""

    def __getitem__(self, characters: slice) -> "Document":
        """Return an excerpt."""
        loss_mask = None if self.loss_mask is None else self.loss_mask[characters]
        return Document(self.text[characters], loss_mask)


def hash_of(text: str) -> int:
    """Return 64 bits of a text's SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


@dataclass
class DocumentReader:
    """Reads the rows of a source as documents; each row is counted in the notes once."""

    name: str
    template: ChatTemplate
    notes: Notes
    """Count whatever was dropped, unknown or changed in the rows that were read."""
    column: str = ""
    """The column to read, if not one of the known names."""
    counted: set[str] = field(default_factory=set)
    """The places of the rows that were read."""

    def read(self, rows: Callable[[], Iterator[Row]]) -> Iterator[Document]:
        """Yield the documents of rows.

        Raises: as `reading_text`; TextError as `RowParser.parse` and `ChatTemplate.render`.
        """
        with reading_text(self.name):
            for place, row in rows():
                notes = Notes() if place in self.counted else self.notes
                self.counted.add(place)
                with at(place):
                    content = RowParser(notes, self.template, self.column).parse(row)
                    if isinstance(content, Conversation):
                        document = _render(content, self.template, notes)
                    else:
                        document = Document(content)
                yield document


def cut(document: Document, size: int) -> list[Document]:
    """Cut a document at blanks into equal excerpts of about `size` characters; an empty one has none."""
    text = document.text
    count = max(1, round(len(text) / size))
    starts = (len(text) * number // count for number in range(1, count))
    blanks = ((start, text.find(" ", start, start + size // 5)) for start in starts)
    borders = [0, *(start if blank < 0 else blank for start, blank in blanks), len(text)]
    return [document[start:stop] for start, stop in itertools.pairwise(borders) if start < stop]


def read_excerpts(name: str, tokenizer: Any, size: int, notes: Notes) -> Iterator[str]:
    """Yield the text of a source in excerpts of about `size` characters, none of them blank, its rows in
    a random order that is always the same.

    tokenizer: its chat template writes conversations. notes: as in `DocumentReader`. Raises: TextError,
        also for a source without text.
    """
    has_text = False
    with reading_text(name):
        rows = partial(open_rows(name).shuffled, 0)
        for document in DocumentReader(name, ChatTemplate(tokenizer), notes).read(rows):
            for excerpt in cut(document, size):
                if excerpt.text.strip():
                    has_text = True
                    yield excerpt.text
    if not has_text:
        raise TextError(f"{name} has no text; give more text")


def _render(conversation: Conversation, template: ChatTemplate, notes: Notes) -> Document:
    """Return a conversation as the chat template writes it.

    If the template rejects it, its turns are rearranged so that user and assistant alternate; if
    that is rejected too, or without a template, the document is the turns' contents.
    """
    messages, tools = conversation.messages, conversation.tools
    rendered = template.render(messages, tools)
    if isinstance(rendered, TemplateError):
        reason, alternating = " ".join(str(rendered).split())[:100], _alternating(messages)
        rendered = template.render(alternating, tools) if alternating else rendered
        is_plain = isinstance(rendered, TemplateError)
        change = "read as plain text" if is_plain else "rearranged so that user and assistant alternate"
        notes.add(f"conversations {change}", reason)
    if isinstance(rendered, TemplateError):
        return Document("\n\n".join(filter(None, map(words_of, messages))))
    _note_left_out(conversation, rendered, notes)
    loss_mask = np.zeros(len(rendered.text), dtype=bool)
    for start, stop in rendered.answers:
        loss_mask[start:stop] = True
    return Document(rendered.text, loss_mask)


def _note_left_out(conversation: Conversation, rendered: Rendered, notes: Notes) -> None:
    """Count what a template leaves out, and answers that are not in the loss for that."""
    pieces = [("tools", tool["function"]["name"]) for tool in conversation.tools or ()]
    for message in conversation.messages:
        pieces += [(message["role"], text.rpartition("</think>")[2]) for text in texts_of(message)]
        pieces += [("reasoning", message.get("reasoning", ""))]
        pieces += [("tool_calls", call["function"]["name"]) for call in message.get("tool_calls", ())]
    for name, text in pieces:
        if text.strip() not in rendered.text:
            notes.add("parts of conversations that the chat template leaves out or changes", name)
    for reason in rendered.left_out:
        notes.add("answers that are not in the loss of assistants, because", reason)


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Drop the assistant's messages before the first question, and join neighbors of the same role.

    Results of tools become the user's turns.
    """
    renamed = [
        message if message["role"] in ("assistant", "system") else {**message, "role": "user"} for message in messages
    ]
    rest = itertools.dropwhile(lambda message: message["role"] == "assistant", renamed)
    joined = []
    for role, group in itertools.groupby(rest, key=lambda message: message["role"]):
        neighbors = list(group)
        content = "\n\n".join(filter(None, map(words_of, neighbors)))
        weight = {"weight": 0} if any("weight" in message for message in neighbors) else {}
        joined.append(neighbors[0] if len(neighbors) == 1 else {"role": role, "content": content} | weight)
    return joined
