"""Turns of any format in, messages in the form in which vLLM hands them to the chat template out.

What `/v1/chat/completions` renders of the same messages is what the served model will read. So
arguments of calls are objects, thoughts have every key that templates read, blocks of calls and
results are read as by `/v1/messages`, and keys that vLLM does not hand on are left out. The rules
are in `vllm/renderers/chat_utils.py` and `vllm/entrypoints/anthropic/serving.py`.
"""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_text.templates import THOUGHTS, ChatTemplate
from ddp_vllm.errors import TextError

MAX_NAMES = 6  # in a printed note
UNREAD = "parts of conversations that the chat template does not read, with their turns"
EXAMPLE = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'

CALLS = ("function_call", "tool_call", "functioncall", "tool_calls")
_NAMES = {
    "user": "user human prompter customer instruction",
    "assistant": "assistant gpt chatgpt bing bard model ai bot chatbot agent llm claude gemini llama output",
    "system": "system developer system_prompt",
    "tool": "tool observation function ipython environment tool_response tool_result tool_output "
    "function_response function_result function_output",
}
SPEAKERS = dict.fromkeys(CALLS, "assistant")
"""The role of each speaker, in lower case; versions such as gpt-4 are known by their beginning."""
for _role, _speakers in _NAMES.items():
    SPEAKERS |= dict.fromkeys(_speakers.split(), _role)
VERSIONED = ("gpt-", "gpt4", "gpt3", "chatgpt-", "claude-", "gemini-", "llama-", "assistant_")

WEIGHTS = ("weight", "train")
"""Keys with which an author excludes a message from the loss: OpenAI's and Axolotl's."""
NOT_NOTED = ("role", "from", "content", "value", *WEIGHTS)
BLOCKS = ("tool_use", "tool_result")
CALL_KEYS, THOUGHT_KEYS = ("tool_calls", "function_call"), (*THOUGHTS, "thinking_blocks")
READ_AS = dict.fromkeys((*CALL_KEYS, "tool_use"), CALL_KEYS[:1]) | dict.fromkeys(THOUGHT_KEYS, THOUGHTS)
"""What an assistant generates besides words, and the keys under which a template may read it."""
HANDED_ON = {"assistant": tuple(READ_AS), "tool": ("tool_call_id",), "developer": ("tools",)}
"""Keys of a role's messages that vLLM hands on, next to `name` and `task`."""

Message = dict[str, Any]


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


@dataclass(frozen=True)
class TurnReader:
    """Reads the turns of one source."""

    notes: Notes
    template: ChatTemplate | None = None
    """Decides on names of roles, on contents that are lists, and on what is noted as unread."""

    def read(self, turns: Any, place: str) -> list[Message]:
        """Return the messages of a list of turns. Raises: TextError."""
        if not isinstance(turns, list):
            raise TextError(f"{place} holds {kind_of(turns)}, not a text or a list of messages; write {EXAMPLE}")
        contents = (turn.get("content") for turn in turns if isinstance(turn, dict))
        parts = itertools.chain.from_iterable(content for content in contents if isinstance(content, list))
        kinds = {"tool_use" if "signature" in part else part.get("type") for part in parts if isinstance(part, dict)}
        is_of_messages = any(block in kinds for block in BLOCKS)  # of /v1/messages
        messages = (self._turn(turn, f"{place}, turn {n}", is_of_messages) for n, turn in enumerate(turns, 1))
        return list(itertools.chain.from_iterable(messages))

    def content(self, texts: list[str], role: str = "user") -> Any:
        """Return the content that the template reads: parts, or texts joined by line breaks."""
        if role != "tool" and self.template and self.template.reads_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def one_system(self, messages: list[Message]) -> list[Message]:
        """Return messages in which developers are the system, joined with it in front, if the
        template does not know developers."""
        system = [message for message in messages if message["role"] in ("developer", "system")]
        is_known = self.template and self.template.knows("developer")
        if is_known or all(message["role"] == "system" for message in system):
            return messages
        content = "\n\n".join(filter(None, map(words_of, system)))
        if system == messages[:1]:
            content = system[0]["content"]
        rest = [message for message in messages if message["role"] not in ("developer", "system")]
        return [{"role": "system", "content": content}, *rest]

    def _turn(self, turn: Any, place: str, is_of_messages: bool) -> Iterator[Message]:
        """Yield results of tools that are blocks of a turn, and its message unless that is empty."""
        if not isinstance(turn, dict):
            raise TextError(f"{place} is {kind_of(turn)}, not an object; write {EXAMPLE}")
        speaker_key = first(turn, ("role", "from")) or "role"
        content_key = first(turn, ("content", "value")) or "content"
        speaker = turn.get(speaker_key)
        if not isinstance(speaker, str) or not speaker.strip():
            reason = f"{kind_of(speaker)} under {speaker_key}" if speaker_key in turn else "no role"
            raise TextError(f"{place} has {reason}; name the speaker under role")
        role, is_result = self._role(speaker), SPEAKERS.get(speaker.strip().lower()) == "tool"
        parts = defaultdict[str, list[Any]](list)
        for kind, part in self._parts(turn.get(content_key), place, content_key):
            is_text = kind not in BLOCKS and not (kind == "thinking" and is_of_messages)
            parts["text" if is_text else kind].append(part)
        for block in parts["tool_result"]:
            words = self._parts(block.get("content"), place, "tool_result")
            texts = [text for kind, text in words if kind not in BLOCKS]
            yield {"role": "tool", "content": "\n".join(texts), "tool_call_id": block.get("tool_use_id") or ""}
        generated = self._generated(turn, parts, speaker, place) if role == "assistant" else {}
        has_content = bool({"content", "value"} & turn.keys())
        if any(parts["text"]) or any(generated.values()) or (is_result and has_content):
            names = ("name", "task", *HANDED_ON.get(role, ()))
            self._note_unread(turn, parts, names)
            others = {key: turn[key] for key in names if key not in READ_AS and turn.get(key) is not None}
            weight = {"weight": 0} if role == "assistant" and self._is_excluded(turn, place) else {}
            if not role:
                self.notes.add("unknown speakers, read as the user, with their turns", speaker)
            content = self.content(parts["text"], role)
            yield {"role": role or "user", "content": content, **generated, **others, **weight}
        elif not has_content and turn.keys() - {"role", "from", *WEIGHTS}:
            raise TextError(f"{place} has no content, only {', '.join(turn)}; name it content")
        elif not parts["tool_result"]:
            self.notes.add("turns without words, which are dropped", speaker)

    def _role(self, speaker: str) -> str:
        """Return the role of a speaker that the chat template knows; "" if nobody knows it."""
        name = speaker.strip().lower()
        role = SPEAKERS.get(name) or ("assistant" if name.startswith(VERSIONED) else "")
        is_known = role in ("system", "tool") and self.template and self.template.knows(name)
        return name if is_known or name == "developer" else role

    def _parts(self, content: Any, place: str, key: str) -> Iterator[tuple[str, Any]]:
        """Yield the kind and the text of each part of a content, and blocks. Raises: TextError."""
        if content is not None and not isinstance(content, str | list):
            raise TextError(f"{place} has {kind_of(content)} under {key}; write it as a string")
        for part in [content] if isinstance(content, str) else content or []:
            if isinstance(part, str):
                yield "text", part
                continue
            if not isinstance(part, dict):
                raise TextError(f"{place} has {kind_of(part)} among the parts of its {key}; write it as a string")
            kind = str(part.get("type", "unnamed"))
            text = part.get(kind if kind in ("refusal", "thinking") else "text")
            if kind in BLOCKS or isinstance(text, str):
                yield kind, part if kind in BLOCKS else text
            else:
                self.notes.add("parts of turns that are no text, which are dropped", kind)

    def _generated(self, turn: Message, parts: dict[str, list[Any]], speaker: str, place: str) -> Message:
        """Return the calls and thoughts of an assistant's turn; calls that are its words are taken
        out of them. Raises: TextError."""
        key = first(turn, CALL_KEYS)
        calls = self._calls(turn[key] if key else parts["tool_use"])
        if calls is None:
            raise TextError(f"{place} has {kind_of(turn.get(key))} under {key}; write calls with name and arguments")
        is_call = speaker.strip().lower() in CALLS and self.template and self.template.reads("tool_calls")
        if is_call and not calls and (calls := self._calls("".join(parts["text"]))):
            parts["text"].clear()
        key = next((key for key in THOUGHT_KEYS if turn.get(key) is not None), "")
        thoughts = parts["thinking"] or turn.get(key)
        if isinstance(thoughts, list):
            thoughts = "".join(block.get("thinking", "") if isinstance(block, dict) else block for block in thoughts)
        if not isinstance(thoughts, str | None):
            raise TextError(f"{place} has {kind_of(thoughts)} under {key}; write it as a string")
        generated = {} if thoughts is None else dict.fromkeys(THOUGHTS, thoughts)
        return generated | ({"tool_calls": calls} if calls else {})

    def _calls(self, packed: Any) -> list[Any] | None:
        """Return the calls of tools that an object, a list or a JSON text holds; None if it holds
        anything else."""
        calls = []
        for value in _values(packed) if isinstance(packed, str) else packed if isinstance(packed, list) else [packed]:
            if value is None:
                continue
            call = parsed(value)
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return None
            given = function.get(first(function, ("arguments", "parameters", "input")))
            arguments = parsed(given)
            if not isinstance(arguments, dict):
                if given:
                    self.notes.add("calls whose arguments are no JSON object, which are left out, as in vLLM")
                arguments = {}
            identity = {"id": call["id"]} if call.get("id") is not None else {}
            calls.append(identity | {"function": {"arguments": arguments, "name": function["name"]}, "type": "function"})
        return calls

    def _is_excluded(self, turn: Message, place: str) -> bool:
        """Tell whether a turn is excluded from the loss. Raises: TextError."""
        weights = []
        for key in WEIGHTS:
            value = turn.get(key)
            weight = parsed(value.lower()) if isinstance(value, str) else value
            if value not in (None, "") and not isinstance(weight, int | float):
                raise TextError(f"{place} has {value!r} under {key}; write 0 or 1")
            if weight not in (None, 0, 1):
                self.notes.add("turns with a weight other than 0 and 1, which count in full", str(value))
            weights.append(weight)
        return 0 in weights

    def _note_unread(self, turn: Message, parts: dict[str, list[Any]], handed_on: tuple[str, ...]) -> None:
        """Count what vLLM does not hand on, or the template does not read."""
        names = [key for key, value in turn.items() if value not in (None, "", []) and key not in NOT_NOTED]
        for name in (*names, *(kind for kind in ("tool_use", "thinking") if parts[kind])):
            keys = READ_AS.get(name, (name,))
            if self.template and not (name in handed_on and any(map(self.template.reads, keys))):
                self.notes.add(UNREAD, name)


def words_of(message: Message) -> str:
    """Return the text of a message."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def first(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the first name under which a row holds anything; "" if none."""
    return next((name for name in names if not is_empty(row.get(name))), "")


def is_empty(value: Any) -> bool:
    return value in (None, "", [], {})


def parsed(value: Any) -> Any:
    """Return the value of a JSON text, None if it is none; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (RecursionError, ValueError):
        return None


def _values(text: str) -> list[Any]:
    """Return the values of a JSON text that follow one another, and those of lists; other text as
    it is."""
    values, rest, decoder = list[Any](), text.strip(), json.JSONDecoder()
    while rest:
        try:
            value, stop = decoder.raw_decode(rest)
        except (RecursionError, ValueError):
            return [text]
        values += value if isinstance(value, list) else [value]
        rest = rest[stop:].lstrip()
    return values


def kind_of(value: Any) -> str:
    """Return the type of a JSON value in words."""
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        return f"a list of {_PLURALS.get(kinds.pop(), 'values')}" if len(kinds) == 1 else "a list"
    return _KINDS.get(type(value), f"a {type(value).__name__}")


_KINDS = {str: "a string", bool: "true or false", int: "a number", float: "a number", dict: "an object"}
_KINDS |= {type(None): "null"}
_PLURALS = {str: "strings", int: "numbers", float: "numbers", dict: "objects", list: "lists"}
