"""What prepared data keeps of its conversations: how many, which tokens count, what was cut."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from headrace.core.errors import MALFORMED, ConfigError
from headrace.core.files import shell, write_whole
from headrace.core.remedy import mend
from headrace.core.strict import Strict
from headrace.data.chat.template import ChatTemplate
from headrace.plan.chat import ChatConfig, RowKind

FILE, TEMPLATE_FILE = "chat.json", "chat_template.jinja"
"""What prepared data keeps of its conversations, and the template that made text of them."""
RULE = 1
"""Version of how rows become tokens that count; other prepared data belongs to another version."""


class ChatCounts(Strict):
    """Count what was met."""

    conversations: dict[RowKind, int] = Field(default_factory=dict)
    """By what their rows hold."""
    answers: int = 0
    """Answers, or plain texts, that are trained on at least in part."""
    tokens: int = 0
    counted: int = 0
    """Tokens that the loss counts."""
    longest: int = 0
    """Tokens of the longest conversation, before any was cut."""
    cut: int = 0
    """Conversations that were longer than `data.chat.max_tokens`."""
    lost_answers: int = 0
    """Answers of these that fell away whole."""
    cut_answers: int = 0
    """Answers of these whose end fell away."""
    without_answer: int = 0
    """Conversations that are left out, since no token of them counts."""
    spell_special: int = 0
    """Conversations with a message that spells a special token, and becomes it."""
    pairs: int = 0
    """Preference pairs that are kept, of two conversations each."""
    equal_pairs: int = 0
    """Pairs that are left out, since both of their conversations are the same."""
    pairs_without_answer: int = 0
    """Pairs that are left out, since one of their conversations has no answer that counts."""


class Met(NamedTuple):
    """Hold what is counted of one conversation."""

    kind: RowKind
    tokens: int
    counted: int
    answers: int
    whole: int
    """Tokens before it was cut."""
    is_cut: bool
    lost_answers: int
    cut_answers: int
    spells_special: bool


class ChatRecord:
    """Hold what is known of prepared conversations.

    Args:
        config: the plan's table `data.chat`.
        template: text of the template.
        names: what the template was given beside messages.
        counts: what was met.
    """

    def __init__(
        self, config: ChatConfig, template: str, names: dict[str, str], counts: ChatCounts
    ) -> None:
        self.config, self.template, self.names, self.counts = config, template, names, counts

    @staticmethod
    def empty(config: ChatConfig, template: ChatTemplate) -> "ChatRecord":
        """Return the record of no conversation yet."""
        return ChatRecord(config, template.text, template.names, ChatCounts())

    @property
    def fingerprint(self) -> str:
        """Return a digest of what makes tokens of a conversation, which a resume compares."""
        return chat_digest(self.config, self.template, self.names)

    @property
    def template_sha256(self) -> str:
        """Return what the chat template is known by."""
        return template_sha256(self.template)

    def measure(self, met: Met) -> None:
        """Note how long a conversation is that may be left out."""
        longest = max(self.counts.longest, met.whole)
        self.counts = self.counts.model_copy(update={"longest": longest})

    def add(self, met: Met) -> None:
        """Count one conversation."""
        was = self.counts
        is_kept = met.counted > 0
        sums = {
            "conversations": {
                **was.conversations,
                met.kind: was.conversations.get(met.kind, 0) + 1,
            },
            "answers": was.answers + met.answers * is_kept,
            "tokens": was.tokens + met.tokens * is_kept,
            "counted": was.counted + met.counted,
            "cut": was.cut + met.is_cut,
            "lost_answers": was.lost_answers + met.lost_answers,
            "cut_answers": was.cut_answers + met.cut_answers,
            "without_answer": was.without_answer + (not is_kept),
            "spell_special": was.spell_special + met.spells_special,
        }
        self.counts = was.model_copy(update=sums)

    def add_pair(self, *, is_kept: bool, is_equal: bool) -> None:
        """Count a preference pair; the conversations of one that is kept are counted by `add`."""
        was = self.counts
        sums = {
            "pairs": was.pairs + is_kept,
            "equal_pairs": was.equal_pairs + is_equal,
            "pairs_without_answer": was.pairs_without_answer + (not is_kept and not is_equal),
        }
        self.counts = was.model_copy(update=sums)

    def take(self, other: ChatCounts) -> None:
        """Add what was counted of another part."""
        values = {
            name: value + getattr(other, name)
            for name, value in self.counts
            if isinstance(value, int)
        } | {"longest": max(self.counts.longest, other.longest)}
        by_kind = Counter(self.counts.conversations) + Counter(other.conversations)
        self.counts = ChatCounts(conversations=dict(by_kind), **values)

    def lines(self) -> list[str]:
        """Return it as lines for a person."""
        counts, by_kind = self.counts, self.counts.conversations
        if self.config.kind == "preference":
            return [*self._pair_lines(), *self._cut_lines()]
        total = sum(by_kind.values())
        share = f"{counts.counted / max(1, counts.tokens):.1%}"
        what = "answers" if self.config.train_on == "answers" else "all of them"
        rows = ", ".join(f"{count:,} of {_ROWS[kind]}" for kind, count in sorted(by_kind.items()))
        lines = [
            f"conversations: {total:,} ({rows}); the loss counts {counts.counted:,} of their "
            f"{counts.tokens:,} tokens ({share}: {what}), in validation too"
        ]
        return [*lines, *self._cut_lines()]

    def _pair_lines(self) -> list[str]:
        """Return what is known of preference pairs."""
        counts = self.counts
        share = f"{counts.counted / max(1, counts.tokens):.1%}"
        lines = [
            f"preference pairs: {counts.pairs:,}, of {counts.tokens:,} tokens with their prompts, "
            f"of which {counts.counted:,} are the answers' ({share}); validation counts the chosen "
            "answers"
        ]
        return [*lines, *self._left_out_pairs()]

    def _left_out_pairs(self) -> list[str]:
        """Return which preference pairs were left out."""
        left_out = {
            "of two equal answers": self.counts.equal_pairs,
            "without an answer on both sides": self.counts.pairs_without_answer,
        }
        return [f"left out: {_number(n, 'pair')} {why}" for why, n in left_out.items() if n]

    def nothing_left(self, source: str) -> ConfigError:
        """Return the error of a source of which no conversation has a token that a loss counts.

        Args:
            source: its name.
        """
        if self.config.max_tokens is not None:
            remedy = mend(f"data.chat.max_tokens={self.counts.longest}")
        elif self.config.kind == "preference":
            remedy = mend("data.chat.kind=chosen")
        else:
            remedy = mend("data.chat.train_on=all")
        why = "; ".join([*self._cut_lines(), *self._left_out_pairs()])
        return ConfigError(f"{source} gives no answer to train on: {why}", remedy)

    def _cut_lines(self) -> list[str]:
        """Return what was cut, left out, and taken for another text."""
        counts, lines = self.counts, list[str]()
        if counts.cut:
            lines.append(
                f"cut to data.chat.max_tokens = {self.config.max_tokens}: "
                f"{_number(counts.cut, 'conversation')}; {_number(counts.lost_answers, 'answer')} "
                f"fell away whole, {counts.cut_answers:,} in part"
            )
        if counts.without_answer:
            who = _number(counts.without_answer, "conversation")
            lines.append(f"left out: {who} without an answer to train on")
        if counts.spell_special:
            who = _number(counts.spell_special, "conversation")
            lines.append(f"{who} with a message that spells a special token, and becomes it")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            **self.config.model_dump(mode="json"),
            **self.counts.model_dump(mode="json"),
            "template_sha256": self.template_sha256,
            "lines": self.lines(),
        }

    def save(self, folder: Path) -> None:
        """Write it beside the shards."""
        kept = {
            "rule": RULE,
            "config": self.config.model_dump(mode="json"),
            "names": self.names,
            "counts": self.counts.model_dump(mode="json"),
        }
        write_whole(folder / TEMPLATE_FILE, self.template)
        write_whole(folder / FILE, json.dumps(kept, indent=1))

    @staticmethod
    def load(folder: Path) -> "ChatRecord | None":
        """Read it; None where no conversations were prepared.

        Raises:
            ConfigError: it is damaged.
        """
        if not (folder / FILE).exists():
            return None
        try:
            kept = json.loads((folder / FILE).read_bytes())
            return ChatRecord(
                ChatConfig.model_validate(kept["config"]),
                (folder / TEMPLATE_FILE).read_text(encoding="utf-8"),
                {str(name): str(value) for name, value in kept["names"].items()},
                ChatCounts.model_validate(kept["counts"]),
            )
        except (OSError, *MALFORMED) as error:
            problem = str(error).splitlines()[0]
            raise ConfigError(
                f"{folder / FILE} is damaged: {problem}", f"rm -r {shell(folder)}"
            ) from None


_ROWS: dict[RowKind, str] = {
    "messages": "messages",
    "completion": "prompt and answer",
    "text": "plain text",
    "preference": "chosen answers",
}


def template_sha256(template: str) -> str:
    """Return what a chat template is known by."""
    return hashlib.sha256(template.encode()).hexdigest()


def chat_digest(config: ChatConfig, template: str, names: dict[str, str]) -> str:
    """Return a digest of all that decides which tokens a conversation becomes, and which count."""
    facts = [RULE, config.model_dump(mode="json", exclude={"template"}), template, names]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}" + "s" * (count != 1)
