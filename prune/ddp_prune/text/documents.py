"""Rows in, documents out: texts, and conversations by the chat template with their loss mask."""

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prune.text.conversations import Conversation, RowParser
from ddp_prune.text.messages import UNREAD, Message, Notes, texts_of, words_of
from ddp_prune.text.rows import Rows, reading_text
from ddp_prune.text.templates import ChatTemplate, Rendered

_SURROGATE = re.compile("[\ud800-\udfff]")
AS_PLAIN_TEXT = "conversations read as plain text, because "


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


def read_documents(
    rows: Rows, template: ChatTemplate, notes: Notes, *, order: Sequence[int] | None = None, column: str = ""
) -> Iterator[Document]:
    """Yield the documents of a source, in the order of its rows or as `Rows.read`.

    notes: counts whatever was dropped, unknown or changed. column: the column to read, if not one
    of the known names.
    Raises: as `reading_text`; TextError as `RowParser.parse` and `ChatTemplate.render`.
    """
    parser = RowParser(notes, template, column, rows.columns)
    with reading_text(rows.name):
        for number, row in rows.read(order):
            notes.begin(number)
            place = rows.place(number)
            content = parser.parse(row, place)
            document = (
                _render(content, template, notes, place) if isinstance(content, Conversation) else Document(content)
            )
            if _SURROGATE.search(document.text):
                notes.add("rows with half a character (a lone surrogate), which is replaced")
                document = Document(_SURROGATE.sub("\ufffd", document.text), document.loss_mask)
            yield document


def _render(conversation: Conversation, template: ChatTemplate, notes: Notes, place: str) -> Document:
    """Return a conversation as the chat template writes it.

    If the template rejects it, its turns are rearranged so that user and assistant alternate; if
    that is rejected too, or without a template, the document is the turns' contents.
    """
    messages, tools = conversation.messages, conversation.tools
    if tools and not template.reads("tools"):
        notes.add(UNREAD, "tools")
    if not template.source:
        notes.add(f"{AS_PLAIN_TEXT}the tokenizer has no chat template; put chat_template.jinja into the model's folder")
    else:
        rendered = template.render(messages, tools, place)
        if isinstance(rendered, Rendered):
            _note_missing(messages, rendered, notes)
            return Document(rendered.text, _loss_mask(rendered))
        reason = " ".join(str(rendered).split())[:80]
        if alternating := _alternating(messages):
            again = template.render(alternating, tools, place)
            if isinstance(again, Rendered):
                notes.add("conversations rearranged so that user and assistant alternate", reason)
                return Document(again.text, _loss_mask(again))
        notes.add(f"{AS_PLAIN_TEXT}the chat template rejects them", reason)
    return Document("\n\n".join(filter(None, map(words_of, messages))))


def _note_missing(messages: Sequence[Message], rendered: Rendered, notes: Notes) -> None:
    """Count what a template leaves out, and conversations whose answers cannot be located."""
    for message in messages:
        words = (text.rpartition("</think>")[2].strip() for text in texts_of(message))
        if not all(text in rendered.text for text in words):
            notes.add("turns that the chat template leaves out or changes", message["role"])
    for statement in rendered.left_out:
        notes.add(statement)
    are_marked = any("weight" in message for message in messages)
    if rendered.answers == [] and not are_marked and not rendered.left_out:
        notes.add("conversations whose answers cannot be located, so none is in the loss of assistants")


def _loss_mask(rendered: Rendered) -> np.ndarray | None:
    """Return the loss mask that selects the answers; None (all characters) without an assistant."""
    if rendered.answers is None:
        return None
    loss_mask = np.zeros(len(rendered.text), dtype=bool)
    for start, stop in rendered.answers:
        loss_mask[start:stop] = True
    return loss_mask


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
