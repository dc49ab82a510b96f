"""Turn conversations into tokens, and say for each whether the loss counts it.

The tokens that the template writes are recognised, so a whole rendered text goes through the
tokenizer at once, as in `transformers`; what is part of an answer is found by the characters that
each token stands for. A message that spells a special token becomes it there too, which is counted
and told. Nothing is put before a conversation: it begins with what its template writes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from headrace.core.errors import ConfigError, TextLost
from headrace.core.files import shell
from headrace.core.remedy import mend
from headrace.data.chat.answers import AnswersHidden, find_answers
from headrace.data.chat.conversation import SIDES
from headrace.data.chat.record import ChatRecord, Met, template_sha256
from headrace.data.chat.template import CHATML_TEXT, ChatTemplate, TemplateRefused
from headrace.data.rows import CHOSEN, REJECTED
from headrace.data.shards import TokenSink
from headrace.data.tokenizer import Tokenizer
from headrace.plan.chat import CHATML, ChatConfig
from headrace.plan.data_config import DataConfig

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a template may read by these names."""
CHATML_REMEDY = mend(f"data.chat.template={CHATML}")
LARGEST = 4 << 20
"""Bytes of a template file beyond which it is refused; those of today's models have 20 KB."""


class Conversation(NamedTuple):
    """Hold a conversation, or a plain text, as tokens."""

    ids: np.ndarray
    """uint32 [n]."""
    counted: np.ndarray
    """uint8 [n]: 1 where the loss counts the token as a target, never the first."""


class Pair(NamedTuple):
    """Two conversations that begin alike, of which the answer of the first is preferred."""

    chosen: Conversation
    rejected: Conversation


def template_of(data: DataConfig) -> ChatTemplate:
    """Return the chat template of a plan.

    Raises:
        ConfigError: there is none, or it is none.
    """
    assert data.chat is not None
    if data.tokenizer == "bpe":
        raise ConfigError(
            "data.chat needs a tokenizer with the tokens of its chat template, and data.tokenizer "
            "= 'bpe' trains one on plain text",
            mend("data.tokenizer=PATH", text="data.tokenizer=PATH of a tokenizer.json"),
        )
    names, own = _beside(data.tokenizer)
    asked = data.chat.template
    if asked == CHATML:
        text, where = CHATML_TEXT, "the built-in chatml"
    elif asked:
        path = Path(asked).expanduser()
        text, where = _read(path, "data.chat.template"), str(path)
    elif own:
        text, where = own, f"the chat template beside {data.tokenizer}"
    else:
        raise ConfigError(
            f"data.tokenizer = {data.tokenizer!r} has no chat template (chat_template.jinja, or "
            "chat_template in tokenizer_config.json), and data.chat.template names none",
            CHATML_REMEDY | "data.chat.template=PATH",
        )
    try:
        return ChatTemplate(text, names, date.fromisoformat(data.chat.date))
    except TemplateRefused as refused:
        raise ConfigError(f"{where} is no template: {refused}", CHATML_REMEDY) from None


def has_template(folder: Path) -> bool:
    """Return whether a chat template lies in the folder of a tokenizer."""
    return bool(_beside(str(folder))[1])


def other_template(record: ChatRecord, tokenizer: str) -> str | None:
    """Return the sha256 of the chat template beside a tokenizer, where it is not the run's.

    Args:
        record: of the run's conversations.
        tokenizer: `data.tokenizer` of the run.
    """
    own = _beside(tokenizer)[1]
    return template_sha256(own) if own and own != record.template else None


def template_line(record: ChatRecord, tokenizer: str) -> str:
    """Return that another chat template lies beside the tokenizer; "" where none does."""
    if (other := other_template(record, tokenizer)) is None:
        return ""
    return (
        f"chat template: the run's is {record.template_sha256[:12]}, and the one beside the "
        f"tokenizer {tokenizer} is {other[:12]}; conversations are written by the run's, here and "
        "in its exports"
    )


def _read(path: Path, key: str) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"{key} = {str(path)!r} is larger than 4 MiB", CHATML_REMEDY)
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} = {str(path)!r} cannot be read: {error}", CHATML_REMEDY) from None


def _beside(tokenizer: str) -> tuple[dict[str, str], str]:
    """Return the names that a template may read, and the template, that lie beside a tokenizer."""
    path = Path(tokenizer).expanduser()
    folder = path if path.is_dir() else path.parent
    if tokenizer == "bpe" or tokenizer.startswith("tiktoken:") or not path.exists():
        return {}, ""
    config: dict[str, Any] = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        if file.is_file():
            try:
                read = json.loads(_read(file, "data.tokenizer"))
            except (ValueError, RecursionError) as error:
                message = f"{file} is not JSON: {error}"
                raise ConfigError(message, f"mv {shell(file)} {shell(f'{file}.bad')}") from None
            config |= read if isinstance(read, dict) else {}
    names = dict[str, str]()
    for name in NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            names[name] = value
    if (file := folder / "chat_template.jinja").is_file():
        return names, _read(file, "data.tokenizer")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [one for one in template if isinstance(one, dict)]
        template = next((one.get("template") for one in named if one.get("name") == "default"), "")
    return names, template if isinstance(template, str) else ""


@dataclass
class ChatEncoder:
    """Turn documents that hold conversations into tokens, and count what is met.

    Args:
        config: the plan's table `data.chat`.
        template: of the conversations.
        tokenizer: of the run.
        lossy: whether text that its tokens do not give back is accepted.
    """

    config: ChatConfig
    template: ChatTemplate
    tokenizer: Tokenizer
    lossy: bool = False

    def __post_init__(self) -> None:
        self._encode = tokenizers.Tokenizer.from_str(self.tokenizer.text)
        self._encode.no_truncation()
        self._encode.no_padding()
        added = json.loads(self.tokenizer.text).get("added_tokens") or []
        self._special = [t["content"] for t in added if t.get("special")]
        self._added = [t["content"] for t in added]
        self.record = ChatRecord.empty(self.config, self.template)

    def encode(self, documents: Sequence[str]) -> list[Conversation | Pair | None]:
        """Return the tokens of each document, in order; None where none counts.

        Raises:
            ConfigError: the template refuses a conversation, or hides its answers.
            TextLost: the tokenizer loses some of its text.
        """
        given = [_sides(json.loads(document)) for document in documents]
        flat = [one for sides in given for one in sides]
        texts = [self._rendered(one) for one in flat]
        encoded = self._encode.encode_batch([text for text, _ in texts], add_special_tokens=False)
        rows = zip(flat, texts, encoded, strict=True)
        made = iter([self._made(one, text, spans, ids) for one, (text, spans), ids in rows])
        return [self._kept([next(made) for _ in sides], sides) for sides in given]

    def _kept(
        self, made: Sequence[tuple[Conversation, Met]], sides: Sequence[dict[str, Any]]
    ) -> Conversation | Pair | None:
        """Count a document, and return what is kept of it; a pair is kept whole or not at all."""
        both = [conversation for conversation, _ in made]
        for _, met in made:
            self.record.measure(met)
        if len(both) == 1:
            self.record.add(made[0][1])
            return both[0] if both[0].counted.any() else None
        is_equal = sides[0]["messages"] == sides[1]["messages"]
        is_kept = not is_equal and all(one.counted.any() for one in both)
        self.record.add_pair(is_kept=is_kept, is_equal=is_equal)
        if not is_kept:
            return None
        for _, met in made:
            self.record.add(met)
        return Pair(*both)

    def add(self, side: TokenSink, document: str, made: Conversation | Pair | None) -> int:
        """Add a conversation, or both of a pair, to a side; return the bytes of its document.

        Its text is what its tokens stand for: special tokens are none.
        """
        both = made if isinstance(made, Pair) else () if made is None else (made,)
        for one, number in zip(both, (CHOSEN, REJECTED), strict=False):
            size = int(self.tokenizer.token_bytes[one.ids].sum(dtype=np.int64))
            side.add(one.ids, text_bytes=max(0, size), counted=one.counted * np.uint8(number))
        return len(document.encode())

    def _rendered(self, given: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """Return a document's text, and which of its characters count."""
        if given["kind"] == "text":
            return given["text"], [(0, len(given["text"]))]
        messages, tools = given["messages"], given.get("tools")
        try:
            if self.config.train_on == "all":
                text = self.template.render(messages, tools).text
                return text, [(0, len(text))]
            after = given.get("shared", 0)
            return find_answers(self.template, messages, tools, self._added, after)
        except TemplateRefused as refused:
            roles = ", ".join(message["role"] for message in messages[:8])
            raise ConfigError(
                f"the chat template refuses a conversation of {len(messages)} messages ({roles}"
                f"{', ...' if len(messages) > 8 else ''}) that begins "
                f"{_beginning(messages)!a}: {refused}",
                CHATML_REMEDY | "the conversation out of the data",
            ) from None
        except AnswersHidden as hidden:
            raise ConfigError(
                f"answers cannot be told from the text of the chat template: {hidden}",
                mend("data.chat.train_on=all")
                | "data.chat.template=PATH of a copy with {% generation %} and {% endgeneration %} "
                "around what the assistant writes",
            ) from None

    def _made(
        self,
        given: dict[str, Any],
        text: str,
        spans: Sequence[tuple[int, int]],
        made: tokenizers.Encoding,
    ) -> tuple[Conversation, Met]:
        """Return the tokens of a text, and what is counted of them."""
        self._check(text, made.ids)
        ids = np.array(made.ids, dtype=np.uint32)
        counted = np.zeros(len(ids), dtype=np.uint8)
        offsets = np.array(made.offsets, dtype=np.int64).reshape(-1, 2)
        begins_at = list[int]()
        for begin, end in spans:
            within = np.flatnonzero((offsets[:, 1] > begin) & (offsets[:, 0] < end))
            if len(within):  # blanks between two tokens of an answer belong to it
                counted[within[0] : within[-1] + 1] = 1
                begins_at.append(int(within[0]))
        if given["kind"] == "text":
            edge = np.array([self.tokenizer.document_token], dtype=np.uint32)
            ids = np.concatenate([edge, ids, edge])
            counted = np.ones(len(ids), dtype=np.uint8)
        counted[:1] = 0
        whole, most = len(ids), self.config.max_tokens or len(ids)
        lost = sum(1 for begin in begins_at if begin >= most)
        halved = int(most < whole and bool(counted[most - 1 : most + 1].all()))
        ids, counted = ids[:most], counted[:most]
        met = Met(
            given["kind"],
            tokens=len(ids),
            counted=int(counted.sum()),
            answers=len(spans) - lost,
            whole=whole,
            is_cut=most < whole,
            lost_answers=lost,
            cut_answers=halved,
            spells_special=given["kind"] != "text" and self._spells(given["messages"]),
        )
        return Conversation(ids, counted), met

    def _spells(self, messages: Sequence[dict[str, Any]]) -> bool:
        """Return whether a message spells a special token."""
        return any(token in message["content"] for message in messages for token in self._special)

    def _check(self, text: str, ids: Sequence[int]) -> None:
        """Refuse tokens that do not give back their text, blanks aside.

        Raises:
            TextLost: with the beginning of the text.
        """
        if self.lossy:
            return
        returned = self._encode.decode(list(ids), skip_special_tokens=False)
        if "".join(returned.split()) != "".join(text.split()):
            raise TextLost(
                f"the tokenizer does not give back a conversation that begins {text[:60]!a}",
                mend(
                    "data.lossy_tokenizer=true",
                    text="data.lossy_tokenizer=true, which every report tells;",
                )
                | "data.tokenizer=PATH of another",
            )


def _sides(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a document as the conversations that it holds: one, or two of a preference pair."""
    if given["kind"] != "preference" or "messages" in given:
        return [given]
    shared = {key: value for key, value in given.items() if key not in SIDES}
    return [{**shared, "messages": given[name]} for name in SIDES]


def _beginning(messages: Sequence[dict[str, Any]]) -> str:
    return next((one["content"] for one in messages if one["content"]), "")[:40]


def chat_encoder(data: DataConfig, tokenizer: Tokenizer) -> ChatEncoder | None:
    """Return what makes tokens of a plan's conversations; None where it has texts.

    Raises:
        ConfigError: it has no chat template.
    """
    if data.chat is None:
        return None
    return ChatEncoder(data.chat, template_of(data), tokenizer, data.lossy_tokenizer)
