"""Rows of every common format as texts or conversations, checked value by value.

A row holds a text, the messages of a conversation, or a question with its answer. `COLUMNS` is the
table of formats. Whatever is dropped, unknown or changed is counted in `Notes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddp_prune.text.messages import (
    EXAMPLE,
    Message,
    Notes,
    TurnReader,
    are_turns,
    first,
    is_empty,
    kind_of,
    parsed,
    words_of,
)
from ddp_prune.text.templates import ChatTemplate
from ddp_vllm.errors import TextError

TURNS = ("messages", "conversations", "conversation")
QUESTION = ("instruction", "prompt", "question", "query", "input")
ANSWER = ("response", "output", "completion", "answer")
CONTEXT = ("context", "input")
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
COLUMNS = ("text", *TURNS, *QUESTION, *ANSWER, *CONTEXT, *SYSTEM, *TOOLS, "history")
"""All columns that are read; of each group the first that is not empty."""
UNREAD_COLUMNS = "columns that are not read, with their rows"


@dataclass(frozen=True)
class Conversation:
    """Messages as `apply_chat_template` takes them."""

    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class RowParser:
    """Reads the rows of one source."""

    notes: Notes
    template: ChatTemplate | None = None
    column: str = ""
    """The column to read; "" finds it by its name."""
    columns: tuple[str, ...] = ()
    """All columns of a table, of which a row holds some."""

    @cached_property
    def turns(self) -> TurnReader:
        return TurnReader(self.notes, self.template)

    def parse(self, row: Any, place: str) -> str | Conversation:
        """Return the text or conversation of a row; "" if it holds none.

        place: of the row, for messages.
        Raises: TextError if the row has no column to read, or a value of another type.
        """
        if isinstance(row, list):
            row = {TURNS[0]: row}
        if not isinstance(row, dict):
            raise TextError(f"{place} is {kind_of(row)}, not an object; write {EXAMPLE}")
        if self.column and self.column not in row:
            raise TextError(
                f"{place} has no column {self.column}, only {self._listed(row)}; name another with --text-column"
            )
        name = self.column or first(row, ("text", *TURNS))
        value = row.get(name) if name == "text" and not self.column else _unpacked(row.get(name))
        if isinstance(value, str) and name not in TURNS:
            self._note_unread(row, name)
            return self._text(value)
        conversation = self._conversation(row, name, place)
        return conversation if conversation.messages else self._text("")

    def _text(self, text: str) -> str:
        if not text.strip():
            self.notes.add("rows without text")
        return text

    def _listed(self, row: Mapping[str, Any]) -> str:
        return ", ".join(map(str, self.columns or row))[:200]

    def _note_unread(self, row: Mapping[str, Any], *read: str) -> None:
        """Count columns that are not read; with a text, only those that hold another form."""
        for column in self.columns or row:
            is_noted = not is_empty(row.get(column)) if column in COLUMNS else len(read) > 1
            if column not in read and is_noted:
                self.notes.add(UNREAD_COLUMNS, column)

    def _conversation(self, row: Mapping[str, Any], turns: str, place: str) -> Conversation:
        """Return the conversation in a column of turns, or of a question with its answer as in
        Alpaca, Dolly, OpenOrca and TRL, after those in the columns for system and history.

        It has no messages if a column is empty. Raises: TextError if the row has no such columns.
        """
        question, answer = ("", "") if turns else (first(row, QUESTION), first(row, ANSWER))
        context, system = "", first(row, SYSTEM)
        if turns:
            messages = self._column(row, turns, "", place)
        elif question and answer:
            context = first(row, tuple(name for name in CONTEXT if name != question))
            messages = self._column(row, question, "user", place)
            before = self._column(row, context, "user", place)
            if messages and before and not are_turns(_unpacked(row[context])):
                words = f"{words_of(messages[-1])}\n\n{words_of(before.pop())}"
                messages[-1]["content"] = self.turns.content([words])
            messages = before + messages + self._column(row, answer, "assistant", place)
        elif row.keys() & {"text", *TURNS} or all(row.keys() & set(c) for c in (QUESTION, ANSWER)):
            return Conversation([])
        else:
            lists = (key for key, value in row.items() if kind_of(value) == "a list of objects")
            rows_key = next(lists, "")
            remedy = f"write the rows under {rows_key} one per line, or " if rows_key else ""
            raise TextError(
                f"{place} has no column text, messages or conversations, nor instruction and "
                f"response, only {self._listed(row)}; {remedy}name one with --text-column"
            )
        if not messages:
            return Conversation([])
        messages = self._column(row, "history", "", place) + messages
        if messages[0]["role"] in ("system", "developer"):
            system = ""
        tools = first(row, TOOLS)
        self._note_unread(row, turns, question, context, answer, system, "history", tools)
        messages = self.turns.one_system(self._column(row, system, "system", place) + messages)
        return Conversation(messages, _tools(row.get(tools), tools, place))

    def _column(self, row: Mapping[str, Any], name: str, role: str, place: str) -> list[Message]:
        """Return the messages of a column of turns, or of the words of a role; [] if it is empty.

        Raises: TextError.
        """
        value, place = _unpacked(row.get(name)), f"{place}, {name}"
        if is_empty(value):
            return []
        if name == "history" and isinstance(value, list) and isinstance(value[0], list):
            for number, pair in enumerate(value, 1):
                if not isinstance(pair, list) or len(pair) != 2:
                    raise TextError(f"{place}, entry {number} is no pair of texts; write a question and its answer")
            roles = ("user", "assistant")
            value = [{"role": roles[n], "content": pair[n]} for pair in value for n in range(2)]
        elif role and not are_turns(value):
            value = [{"role": role, "content": value}]
        return self.turns.read(value, place)


def _unpacked(value: Any) -> Any:
    """Return the turns that a string holds as JSON; any other value as it is."""
    turns = parsed(value) if isinstance(value, str) and value.lstrip().startswith("[") else None
    return turns if turns and are_turns(turns) else value


def _tools(given: Any, name: str, place: str) -> list[Any] | None:
    """Return the tools of a column, which may be packed as JSON or bare functions, as vLLM hands
    them on. Raises: TextError."""
    tools, values = [], parsed(given) if name else []
    for value in values if isinstance(values, list) else [None]:
        tool = value.get("function", value) if isinstance(value, dict) else None
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise TextError(f"{place} has {kind_of(given)} under {name}; write a list of functions")
        function = {key: tool.get(key) for key in ("name", "description", "parameters")}
        strict = {"strict": tool["strict"]} if tool.get("strict") is not None else {}
        tools.append({"type": "function", "function": function | strict})
    return tools or None
