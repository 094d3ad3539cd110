"""Rows of every common format as texts or conversations, checked value by value.

A row holds a text, the messages of a conversation, or a question with its answer. `COLUMNS` is the
table of formats. Whatever is dropped, unknown or changed is counted in `Notes`.
"""

from dataclasses import dataclass
from typing import Any

from ddp_prune.text.messages import (
    EXAMPLE,
    Message,
    Notes,
    TurnReader,
    are_turns,
    at,
    first,
    is_empty,
    kind_of,
    parsed,
    with_one_system_message,
)
from ddp_prune.text.templates import ChatTemplate
from ddp_vllm.errors import TextError

TURNS = ("messages", "conversations", "conversation")
QUESTION = ("instruction", "prompt", "question", "query", "input")
ANSWER = ("response", "output", "completion", "answer")
CONTEXT = ("context", "input")
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
HISTORY = "history"  # pairs of a question and its answer, which precede the others
COLUMNS = ("text", *TURNS, *QUESTION, *ANSWER, *CONTEXT, *SYSTEM, *TOOLS, HISTORY)
"""All columns that are read; of each group the first that is not empty."""


@dataclass(frozen=True)
class Conversation:
    """Messages as `apply_chat_template` takes them."""

    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class RowParser:
    """Reads the rows of one source."""

    notes: Notes
    template: ChatTemplate
    column: str = ""
    """The column to read; "" finds it by its name."""

    def parse(self, row: Any) -> str | Conversation:
        """Return the text or conversation of a row; "" if it holds none.

        Raises: TextError if the row has no column to read, or a value of another type.
        """
        if isinstance(row, list):
            row = {TURNS[0]: row}
        if not isinstance(row, dict):
            raise TextError(f"{kind_of(row)}, not an object; write {EXAMPLE}")
        if self.column and self.column not in row:
            raise TextError(f"no column {self.column}, only {_listed(row)}; name another with --text-column")
        name = self.column or first(row, ("text", *TURNS))
        text = _unpacked(row.get(name))
        if isinstance(text, str) and name not in TURNS:
            self._note_unread({column: value for column, value in row.items() if column in COLUMNS}, name)
        else:
            conversation = self._conversation(row, name)
            if conversation.messages:
                return conversation
            text = ""
        if not text.strip():
            self.notes.add("rows without text")
        return text

    def _conversation(self, row: dict[str, Any], turns: str) -> Conversation:
        """Return the conversation in a column of turns, or of a question with its answer as in
        Alpaca, Dolly, OpenOrca and TRL; without messages if a column is empty.

        Raises: TextError if the row has no such columns.
        """
        question, answer, context = first(row, QUESTION), first(row, ANSWER), ""
        if turns:
            messages = self._column(row, turns)
        elif question and answer:
            context = first(row, [name for name in CONTEXT if name != question and isinstance(row.get(name), str)])
            if context and isinstance(row[question], str):
                row = row | {question: f"{row[question]}\n\n{row[context]}"}
            before = self._column(row | {HISTORY: _turns_of(row.get(HISTORY))}, HISTORY)
            messages = before + self._column(row, question, "user") + self._column(row, answer, "assistant")
        elif row.keys() & {"text", *TURNS} or all(row.keys() & set(names) for names in (QUESTION, ANSWER)):
            return Conversation([])
        else:
            raise TextError(
                f"no column text, messages or conversations, nor instruction and response, only {_listed(row)}; name "
                "one with --text-column"
            )
        system, tools = first(row, SYSTEM), first(row, TOOLS)
        if messages and messages[0]["role"] in ("system", "developer"):
            system = ""
        self._note_unread(row, *([turns] if turns else [question, context, answer, HISTORY]), system, tools)
        before = self._column(row, system, "system") if messages else []
        messages = with_one_system_message(before + messages, self.template)
        return Conversation(messages, _tools(row[tools], tools) if tools else None)

    def _note_unread(self, row: dict[str, Any], *read: str) -> None:
        """Count columns that are not read."""
        for column, value in row.items():
            if column not in read and not is_empty(value):
                self.notes.add("columns that are not read, with their rows", column)

    def _column(self, row: dict[str, Any], name: str, role: str = "") -> list[Message]:
        """Return the messages of a column of turns, or of the words of a role; [] if it is empty.

        Raises: TextError.
        """
        value = _unpacked(row.get(name))
        if is_empty(value):
            return []
        turns = [{"role": role, "content": value}] if role and not are_turns(value) else value
        with at(name):
            return TurnReader(self.notes, self.template).read(turns)


def _listed(row: dict[str, Any]) -> str:
    return ", ".join(map(str, row))[:200]


def _unpacked(value: Any) -> Any:
    """Return the turns that a string holds as JSON; any other value as it is."""
    turns = parsed(value) if isinstance(value, str) and value.lstrip().startswith("[") else None
    return turns if turns and are_turns(turns) else value


def _turns_of(pairs: Any) -> Any:
    """Return pairs of a question and its answer as turns; anything else as it is, for `TurnReader`."""
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return pairs
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _tools(given: Any, name: str) -> list[Any]:
    """Return the tools of a column, which may be packed as JSON or bare functions, as vLLM hands
    them on. Raises: TextError."""
    tools, values = [], parsed(given)
    for value in values if isinstance(values, list) else [None]:
        tool = value.get("function", value) if isinstance(value, dict) else None
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise TextError(f"{kind_of(given)} under {name}; write a list of functions")
        function = {key: tool.get(key) for key in ("name", "description")}
        function["parameters"] = tool.get(first(tool, ("parameters", "input_schema", "inputSchema")))
        strict = {"strict": tool["strict"]} if tool.get("strict") is not None else {}
        tools.append({"type": "function", "function": function | strict})
    return tools
