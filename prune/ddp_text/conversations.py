"""Rows of every common format as texts or conversations, checked value by value.

A row holds a text, the messages of a conversation, or a question with its answer. Messages keep all
their keys, because the chat template knows which of them it reads: `tool_calls`,
`reasoning_content`. Whatever is dropped, unknown or changed is counted in `Notes`.
"""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_text.templates import THOUGHTS, ChatTemplate
from ddp_vllm.errors import TextError

TURNS = ("messages", "conversations", "conversation")
QUESTION = ("instruction", "prompt", "question", "query", "input")
ANSWER = ("response", "output", "completion", "answer")
CONTEXT = ("context", "input")
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
COLUMNS = ("text", *TURNS, *QUESTION, *ANSWER, *CONTEXT, *SYSTEM, *TOOLS, "history")
"""All columns that are read; of each group the first that is not empty."""

CALLS = ("function_call", "tool_call", "functioncall", "tool_calls")
_NAMES = {
    "user": "user human prompter customer instruction",
    "assistant": "assistant gpt chatgpt bing bard model ai bot chatbot agent llm claude gemini llama output",
    "system": "system developer system_prompt",
    "tool": "tool observation function ipython environment tool_response tool_result tool_output "
    "function_response function_result function_output",
}
SPEAKERS = dict.fromkeys(CALLS, "assistant")
"""The role of each speaker, in lower case; versions such as gpt-4 are recognized by their
beginning."""
for _role, _speakers in _NAMES.items():
    SPEAKERS |= dict.fromkeys(_speakers.split(), _role)
VERSIONED = ("gpt-", "gpt4", "gpt3", "chatgpt-", "claude-", "gemini-", "llama-", "assistant_")
WORDS = ("tool_calls", "function_call", *THOUGHTS)
"""Keys of a message, next to its content, that hold what a model generates."""
READ_HERE = ("weight", "train")
"""Keys of a message with which its author excludes it from the loss: OpenAI's and Axolotl's."""
MAX_NAMES = 6  # in a printed note

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages as `apply_chat_template` takes them."""

    messages: list[Message]
    tools: list[Any] | None = None


class Notes:
    """Counts what was dropped, unknown or changed in the rows of one source, each row once."""

    def __init__(self) -> None:
        self.counts = defaultdict[str, Counter[str]](Counter)
        self.seen = bytearray()
        self.row_is_new = True

    def begin(self, row: int) -> None:
        """State the number of the row that is read next; rows that were read before are not
        counted."""
        self.seen.extend(bytes(max(0, row + 1 - len(self.seen))))
        self.row_is_new, self.seen[row] = not self.seen[row], 1

    def add(self, statement: str, name: str = "") -> None:
        """Count one case of a statement about a name."""
        if self.row_is_new:
            self.counts[statement][name] += 1

    def lines(self, source: str) -> Iterator[str]:
        """Yield a line per statement, with the most frequent names."""
        for statement, names in self.counts.items():
            if set(names) == {""}:
                yield f"{source}: {names['']:,} {statement}"
                continue
            listed = [f"{name} ({count:,})" for name, count in names.most_common(MAX_NAMES)]
            more = len(names) - len(listed)
            yield f"{source}: {statement}: {', '.join(listed)}{f' and {more:,} more' * bool(more)}"


UNREAD_COLUMNS = "columns that are not read, with their rows"
EXAMPLE = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'


@dataclass(frozen=True)
class RowParser:
    """Reads the rows of one source."""

    notes: Notes
    template: ChatTemplate | None = None
    """Decides on names of roles and on contents that are lists."""
    column: str = ""
    """The column to read; "" finds it by its name."""
    columns: tuple[str, ...] = ()
    """All columns of a table, of which a row holds some."""

    def parse(self, row: Any, place: str) -> str | Conversation:
        """Return the text or conversation of a row; "" if it holds none.

        place: of the row, for messages.
        Raises: TextError if the row has no column to read, or a value of another type.
        """
        if isinstance(row, list):
            row = {TURNS[0]: row}
        if not isinstance(row, dict):
            raise TextError(f"{place} is {_kind(row)}, not an object; write {EXAMPLE}")
        if self.column and self.column not in row:
            raise TextError(
                f"{place} has no column {self.column}, only {self._listed(row)}; name another with --text-column"
            )
        name = self.column or _first(row, ("text", *TURNS))
        value = row.get(name) if name == "text" and not self.column else _unpacked(row.get(name))
        if isinstance(value, str) and name not in TURNS:
            return self._text(value)
        if name:
            messages = [] if value is None else self._messages(value, f"{place}, {name}")
        else:
            messages = self._question_and_answer(row, place)
        if not messages:
            return self._text("")
        for column in self.columns or row:
            if column != name and column not in COLUMNS:
                self.notes.add(UNREAD_COLUMNS, column)
        return Conversation(self._before(row, messages, place) + messages, _tools(row, place))

    def _text(self, text: str) -> str:
        if not text.strip():
            self.notes.add("rows without text")
        return text

    def _listed(self, row: Mapping[str, Any]) -> str:
        return ", ".join(map(str, self.columns or row))[:200]

    def _question_and_answer(self, row: Mapping[str, Any], place: str) -> list[Message]:
        """Return the messages of a row as in Alpaca, Dolly, OpenOrca, or TRL's prompts with
        completions.

        Returns [] if a column is empty. Raises: TextError if the row has no such columns.
        """
        if not (row.keys() & set(QUESTION) and row.keys() & set(ANSWER)):
            if row.keys() & {"text", *TURNS}:
                return []
            lists = (key for key, value in row.items() if _kind(value) == "a list of objects")
            rows_key = next(lists, "")
            remedy = f"write the rows under {rows_key} one per line, or " if rows_key else ""
            raise TextError(
                f"{place} has no column text, messages or conversations, nor instruction and "
                f"response, only {self._listed(row)}; {remedy}name one with --text-column"
            )
        question, answer = _first(row, QUESTION), _first(row, ANSWER)
        if not question or not answer:
            return []
        messages = self._column(row, question, "user", place)
        contexts = (name for name in CONTEXT if name != question and not _is_empty(row.get(name)))
        if context := next(contexts, ""):
            (message,) = self._column(row, context, "user", place)
            messages[0]["content"] = f"{words_of(messages[0])}\n\n{words_of(message)}"
        return messages + self._column(row, answer, "assistant", place)

    def _column(self, row: Mapping[str, Any], name: str, role: str, place: str) -> list[Message]:
        """Return the messages of a column that holds the words of one role, or a list of turns."""
        value = _unpacked(row[name])
        turns = value if isinstance(value, list) else [{"role": role, "content": value}]
        return self._messages(turns, f"{place}, {name}")

    def _before(self, row: Mapping[str, Any], messages: list[Message], place: str) -> list[Message]:
        """Return the messages that the columns for system and history put before a conversation."""
        before = list[Message]()
        if not _is_empty(history := row.get("history")):
            if isinstance(history, list) and all(isinstance(turn, list) for turn in history):
                texts = itertools.chain.from_iterable(history)
                roles = itertools.cycle(("user", "assistant"))
                pairs = zip(roles, texts, strict=False)
                history = [{"role": role, "content": text} for role, text in pairs]
            before = self._messages(history, f"{place}, history")
        system = _first(row, SYSTEM)
        if system and messages[0]["role"] in ("system", "developer"):
            self.notes.add(UNREAD_COLUMNS, system)
        elif system:
            before = self._column(row, system, "system", place) + before
        return before

    def _messages(self, turns: Any, place: str) -> list[Message]:
        """Return the messages of a conversation that hold words. Raises: TextError."""
        if not isinstance(turns, list):
            raise TextError(f"{place} holds {_kind(turns)}, not a text or a list of messages; write {EXAMPLE}")
        messages = (self._message(turn, f"{place}, turn {number}") for number, turn in enumerate(turns, 1))
        return [message for message in messages if message]

    def _message(self, turn: Any, place: str) -> Message | None:
        """Return a turn as a message; None if it holds no words. Raises: TextError."""
        if not isinstance(turn, dict):
            raise TextError(f"{place} is {_kind(turn)}, not an object; write {EXAMPLE}")
        speaker_key = _first(turn, ("role", "from")) or "role"
        content_key = _first(turn, ("content", "value")) or "content"
        speaker = turn.get(speaker_key)
        if not isinstance(speaker, str) or not speaker.strip():
            reason = f"{_kind(speaker)} under {speaker_key}" if speaker_key in turn else "no role"
            raise TextError(f"{place} has {reason}; name the speaker under role")
        content = self._content(turn.get(content_key), place, content_key)
        has_content = bool({"content", "value"} & turn.keys())
        more = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value")}
        if _is_empty(content) and all(_is_empty(more.get(key)) for key in WORDS):
            if not has_content and not more.keys() <= set(READ_HERE):
                raise TextError(f"{place} has no content, only {', '.join(turn)}; name it content")
            self.notes.add("turns without words, which are dropped", speaker)
            return None
        message = {"role": self._role(speaker)} | ({"content": content} if has_content else {})
        return self._with_calls(message | more, speaker)

    def _role(self, speaker: str) -> str:
        """Return the role of a speaker that the chat template knows."""
        name = speaker.strip().lower()
        role = SPEAKERS.get(name) or ("assistant" if name.startswith(VERSIONED) else "")
        if not role:
            self.notes.add("unknown speakers, read as the user, with their turns", speaker)
            return "user"
        if role in ("system", "tool") and self.template and self.template.knows(name):
            return name  # such as developer, which the templates of some models know
        return role

    def _with_calls(self, message: Message, speaker: str) -> Message:
        """Return a message whose calls of tools stand where chat templates look for them.

        ShareGPT packs them into the words of a speaker such as function_call, OpenAI's older format
        into a key.
        """
        if not (self.template and self.template.reads("tool_calls")) or message.get("tool_calls"):
            return message
        if speaker.strip().lower() in CALLS and isinstance(content := message.get("content"), str):
            calls, rest = _calls(content), {"content": ""}
        else:
            calls, rest = _calls(message.get("function_call")), {}
        if not calls:
            return message
        kept = {key: value for key, value in message.items() if key != "function_call"} | rest
        return kept | {"tool_calls": [{"type": "function", "function": call} for call in calls]}

    def _content(self, content: Any, here: str, key: str) -> Any:
        """Return a message's words: a string, None, or its parts of text if the template reads
        parts.

        Other templates get the parts joined by line breaks, as in vLLM. Raises: TextError.
        """
        if content is None or isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise TextError(f"{here} has {_kind(content)} under {key}; write it as a string")
        parts = []
        for value in content:
            part = {"type": "text", "text": value} if isinstance(value, str) else value
            if not isinstance(part, dict):
                raise TextError(f"{here} has {_kind(part)} among the parts of its {key}; write it as a string")
            if isinstance(part.get("text"), str):
                parts.append(part)
            else:
                kind = str(part.get("type", "unnamed"))
                self.notes.add("parts of turns that are no text, which are dropped", kind)
        if self.template and self.template.reads_parts:
            return parts
        return "\n".join(part["text"] for part in parts)


def words_of(message: Message) -> str:
    """Return the text of a message."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or value == []


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the first name under which a row holds anything; "" if none."""
    return next((name for name in names if not _is_empty(row.get(name))), "")


def _kind(value: Any) -> str:
    """Return the type of a JSON value in words."""
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        return f"a list of {_PLURALS.get(kinds.pop(), 'values')}" if len(kinds) == 1 else "a list"
    return _KINDS.get(type(value), f"a {type(value).__name__}")


_KINDS = {str: "a string", bool: "true or false", int: "a number", float: "a number", dict: "an object"}
_KINDS |= {type(None): "null"}
_PLURALS = {str: "strings", int: "numbers", float: "numbers", dict: "objects", list: "lists"}


def _parsed(words: str) -> Any:
    """Return the value of a JSON text; None if it is none."""
    try:
        return json.loads(words)
    except (RecursionError, ValueError):
        return None


def _unpacked(value: Any) -> Any:
    """Return the messages that a string holds as JSON; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    turns = _parsed(value)
    is_packed = turns and all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in turns)
    return turns if is_packed else value


def _calls(packed: Any) -> list[Any]:
    """Return the calls of tools that an object, or a JSON text of one or several, holds; [] if
    none."""
    value = _parsed(packed) if isinstance(packed, str) else packed
    calls = value if isinstance(value, list) else [value]
    is_call = all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls)
    return calls if is_call else []


def _tools(row: Mapping[str, Any], place: str) -> list[Any] | None:
    """Return the tools of a row, which may be packed as JSON. Raises: TextError."""
    name = _first(row, TOOLS)
    given = row.get(name)
    tools = _parsed(given) if isinstance(given, str) else given
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        if name:
            raise TextError(f"{place} has {_kind(given)} under {name}; write a list of objects")
        return None
    if name == "functions":
        tools = [{"type": "function", "function": tool} for tool in tools]
    return tools or None
