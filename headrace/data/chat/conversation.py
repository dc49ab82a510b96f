"""Make a conversation of a row, whose kind is known by its fields.

A conversation goes through preparation as a document whose text is its JSON: it is held out,
cleaned and counted as any other text, and a template makes words and tokens of it when it is
encoded. So a conversation is on one side whole, and equal conversations are on one side.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.files import parse_json
from headrace.core.remedy import mend
from headrace.plan.chat import ChatConfig, RowKind

PAIRS = (
    ("prompt", ("completion", "response")),
    ("instruction", ("output", "response")),
)
"""Fields of a question, and those that its answer may stand in."""
INPUTS = ("input", "context")
"""Fields of what an `instruction` is about, which follows it after an empty line."""
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Roles of the older `from` and `value`, and what templates call them."""
SIDES = ("chosen", "rejected")
"""Fields of a preference pair, in the order in which its conversations are kept."""
LISTS = ("messages", "conversations")
"""Fields that hold the messages of a conversation."""
FIELDS = (
    *LISTS,
    *("prompt", "completion", "response", "instruction", *INPUTS, "output"),
    *("chosen", "rejected", "system", "tools"),
)
"""All fields that are read of a row, beside `data.text_key`."""
AUTO = "data.chat.kind=auto"


@dataclass(frozen=True)
class ChatReading:
    """Say how rows become conversations.

    Args:
        config: the plan's table `data.chat`.
        text_key: the field of plain text.
    """

    config: ChatConfig
    text_key: str

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the fields of a row that are read."""
        return (*FIELDS, self.text_key.partition(".")[0])

    def text_of(self, row: Any, origin: str, remedy: Callable[[], str]) -> str | None:
        """Return a row's conversation as JSON, or None for a null.

        Args:
            row: an object with fields, or plain text.
            origin: where it stands.
            remedy: makes the command that takes the row out.

        Raises:
            ConfigError: it holds no conversation, or another kind than the plan says.
        """
        if isinstance(row, str):
            return plain(row)
        if not isinstance(row, dict):
            name = type(row).__name__
            raise ConfigError(f"{origin} is a JSON {name}, not an object with fields", remedy())
        given, row = row, {key: value for key, value in row.items() if value is not None}
        if given and not row:
            return None
        known, asked = kind_of_row(row, self.text_key), self.config.kind
        kind: RowKind | None = known
        if asked not in ("auto", "chosen"):
            kind = asked if _holds(row, asked, self.text_key) else None
        if kind is None:
            names = ", ".join(row) or "none"
            if known is not None:
                message = f"{origin} holds {WORDS[known]}, and data.chat.kind = {asked!r}"
                raise ConfigError(f"{message}; its fields are {names}", AUTO)
            raise ConfigError(
                f"{origin} is no conversation: its fields are {names}, and none of messages, "
                f"conversations, prompt and completion, instruction and output, {self.text_key}",
                f"data.text_key=FIELD for plain text, or {remedy()}",
            )
        if kind == asked == "preference":
            return self._pair_of(row, origin, remedy)
        if kind == "preference" and asked != "chosen":
            raise ConfigError(
                f"{origin} holds a preference pair (chosen and rejected), and this trains on "
                "conversations",
                mend("data.chat.kind=preference")
                | "data.chat.kind=chosen, which trains on the chosen answers alone",
            )
        if kind == "text":
            text = row[self.text_key]
            return plain(text) if isinstance(text, str) else _refuse(origin, "text", text, remedy)
        messages = self._begun(_messages(row, kind, origin, remedy))
        if not messages:
            return None
        made: dict[str, Any] = {"kind": kind, "messages": messages, **_tools(row, origin, remedy)}
        return json.dumps(made, ensure_ascii=False)

    def _pair_of(
        self, row: Mapping[str, Any], origin: str, remedy: Callable[[], str]
    ) -> str | None:
        """Return a preference pair as JSON: two conversations, and how many turns they share.

        Raises:
            ConfigError: an answer is a text, and no prompt says what it answers.
        """
        if not row.get("prompt") and any(isinstance(row[name], str) for name in SIDES):
            raise ConfigError(
                f"{origin} holds chosen and rejected as texts, and no prompt that they answer",
                mend("data.chat.kind=chosen") | remedy(),
            )
        chosen, rejected = (
            self._begun(_messages({**row, "chosen": row[name]}, "preference", origin, remedy))
            for name in SIDES
        )
        if not chosen or not rejected:
            return None
        same = [one == other for one, other in zip(chosen, rejected, strict=False)]
        shared = same.index(False) if False in same else len(same)
        made = {
            "chosen": chosen,
            "rejected": rejected,
            "shared": shared,
            **_tools(row, origin, remedy),
        }
        return json.dumps({"kind": "preference", **made}, ensure_ascii=False)

    def _begun(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages that begin with the plan's system prompt, where they have none."""
        if messages and self.config.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.config.system})
        return messages


WORDS: dict[RowKind, str] = {
    "messages": "messages",
    "completion": "a prompt and its answer",
    "text": "plain text",
    "preference": "a preference pair",
}
"""What a row holds, in words."""


def _tools(row: Mapping[str, Any], origin: str, remedy: Callable[[], str]) -> dict[str, Any]:
    """Return the tools of a row, where it has some; a text is their JSON.

    Raises:
        ConfigError: a text is no JSON.
    """
    tools = row.get("tools")
    if not isinstance(tools, str):
        return {"tools": tools} if tools else {}
    try:
        return {"tools": parse_json(tools)} if tools else {}
    except ValueError:
        return _refuse(origin, "tools", tools, remedy, "is text that is no JSON")


def plain(text: str) -> str | None:
    """Return plain text as a document of a chat source; None for none."""
    return json.dumps({"kind": "text", "text": text}, ensure_ascii=False) if text else None


def kind_of_row(row: Mapping[str, Any], text_key: str = "text") -> RowKind | None:
    """Return what a row holds, by its fields; None where it is nothing that is known."""
    order: tuple[RowKind, ...] = ("preference", "messages", "completion", "text")
    return next((kind for kind in order if _holds(row, kind, text_key)), None)


def _holds(row: Mapping[str, Any], kind: str, text_key: str) -> bool:
    if kind == "preference":
        return "chosen" in row and "rejected" in row
    if kind == "messages":
        return any(isinstance(row.get(name), list) for name in LISTS)
    if kind == "completion":
        return _pair(row) is not None
    return text_key in row


def _pair(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the fields of a row's question and answer."""
    for question, answers in PAIRS:
        answer = next((name for name in answers if name in row), None)
        if question in row and answer is not None:
            return question, answer
    return None


def _messages(
    row: Mapping[str, Any], kind: RowKind, origin: str, remedy: Callable[[], str]
) -> list[dict[str, Any]]:
    """Return the messages of a row, with the roles and fields that templates read."""
    if kind == "messages":
        given = next(row[name] for name in LISTS if isinstance(row.get(name), list))
        return [_message(one, origin, remedy) for one in given]
    if kind == "preference":
        question, answer = row.get("prompt", []), row["chosen"]
    else:
        names = _pair(row)
        assert names is not None
        question, answer = row[names[0]], row[names[1]]
        about = next((row[name] for name in INPUTS if row.get(name)), "")
        if about and isinstance(question, str):
            question = f"{question}\n\n{about}"
    made: list[dict[str, Any]] = []
    if isinstance(row.get("system"), str) and row["system"]:
        made.append({"role": "system", "content": row["system"]})
    for value, role in ((question, "user"), (answer, "assistant")):
        if isinstance(value, str):
            made.append({"role": role, "content": value})
        elif isinstance(value, list):
            made += [_message(one, origin, remedy) for one in value]
        else:
            _refuse(origin, role, value, remedy)
    return made


def _message(given: Any, origin: str, remedy: Callable[[], str]) -> dict[str, Any]:
    """Return a message with `role` and `content`, and what else it holds for the template.

    Raises:
        ConfigError: it has no role, or its content is no text.
    """
    if not isinstance(given, dict):
        _refuse(origin, "a message", given, remedy)
    values = {key: value for key, value in given.items() if value is not None}
    if "from" in values and "role" not in values:
        values["role"] = values.pop("from")
        values.setdefault("content", values.pop("value", ""))
    role, content = values.pop("role", None), values.pop("content", "")
    if not isinstance(role, str):
        fields = ", ".join(given) or "none"
        message = f"{origin} has a message without a role; its fields are {fields}"
        raise ConfigError(message, remedy())
    if isinstance(content, list):  # parts, of which text is one kind
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            _refuse(origin, f"the content of {role}", content, remedy)
        content = "".join(texts)
    if not isinstance(content, str):
        _refuse(origin, f"the content of {role}", content, remedy)
    return {"role": ROLES.get(role, role), "content": content, **values}


def _refuse(
    origin: str, what: str, value: Any, remedy: Callable[[], str], problem: str = ""
) -> Any:
    problem = problem or f"is {type(value).__name__}, not text"
    raise ConfigError(f"{origin}: {what} {problem}", remedy())
