"""Talk with a run that was trained on conversations, by the template that it was trained with.

A turn renders the conversation so far with the beginning of an answer, and generates until the
model writes what the template puts behind an answer. What ends an answer is found by rendering one,
so it holds for every template.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import tokenizers
import torch

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.data.chat.answers import ASSISTANT
from headrace.data.chat.record import ChatRecord
from headrace.data.chat.template import ChatTemplate, TemplateRefused
from headrace.inference.sample import generate

PROBE = "\N{WHITE SMILING FACE}answer\N{WHITE SMILING FACE}"
"""A text that no template writes by itself."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What stands for bytes that are no character, or not yet."""


@dataclass
class Chat:
    """Hold a conversation with a trained run.

    Args:
        build: the run, as `open_model` returned it.
        template: the chat template that it was trained with.
        messages: what was said so far, `role` and `content` each.
    """

    build: Build
    template: ChatTemplate
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._encoder = tokenizers.Tokenizer.from_str(self.build.prepared.tokenizer.text)
        self.end = _end_of(self.template)

    @classmethod
    def of(cls, build: Build, run: Path, system: str = "") -> "Chat":
        """Begin a conversation with a run.

        Args:
            build: the run, as `open_model` returned it.
            run: its folder.
            system: a system prompt; that of its plan without one.

        Raises:
            ConfigError: it was not trained on conversations.
        """
        record = ChatRecord.load(run)
        if record is None:
            raise ConfigError(
                f"{run} was not trained on conversations, and has no chat template",
                f"headrace sample {shell(run)} --prompt TEXT, which continues a text",
            )
        config = record.config
        template = ChatTemplate(record.template, record.names, date.fromisoformat(config.date))
        system = system or config.system
        return cls(build, template, [{"role": "system", "content": system}] if system else [])

    def reply(
        self,
        text: str,
        *,
        new_tokens: int,
        show: Callable[[str], None] = lambda piece: None,
        **how: Any,
    ) -> str:
        """Return the answer to a message, and remember both.

        Args:
            text: what the user says.
            new_tokens: the most tokens of the answer.
            show: takes the pieces of the answer while it is written; they add up to it.
            **how: further arguments of `generate`.

        Raises:
            ConfigError: the template refuses the conversation, or the model has no more positions.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            prompt = self.template.render(messages, None, add_generation_prompt=True).text
        except TemplateRefused as refused:
            raise ConfigError(
                f"the chat template refuses the turn: {refused}", "--system ''"
            ) from None
        ids = self._encoder.encode(prompt, add_special_tokens=False).ids
        ids_BT = torch.tensor([ids], device=self.build.device)
        tokenizer, shown = self.build.prepared.tokenizer, 0

        def ends(new: list[int]) -> bool:
            nonlocal shown
            begun = self._text(new)
            if self.end and self.end in begun:
                return True
            certain = self._certain(begun)
            show(certain[shown:])
            shown = max(shown, len(certain))
            return False

        with self.build.autocast():
            rows_BT = generate(
                self.build.model,
                ids_BT,
                new_tokens=new_tokens,
                stop=tokenizer.document_token,
                entries=tokenizer.vocab,
                until=ends,
                **how,
            )
        answer = self._text(rows_BT[0, len(ids) :].tolist())
        answer = (answer.partition(self.end)[0] if self.end else answer).strip()
        show(answer[shown:])
        self.messages = [*messages, {"role": ASSISTANT, "content": answer}]
        return answer

    def _certain(self, begun: str) -> str:
        """Return what of an answer stays as it is, whatever the next tokens are.

        Its last characters may be blanks behind the answer, a part of a character, or a part of
        what ends it.
        """
        whole = begun.rstrip(UNKNOWN)
        part = next((n for n in range(len(self.end), 0, -1) if whole.endswith(self.end[:n])), 0)
        return whole[: len(whole) - part].strip()

    def _text(self, ids: list[int]) -> str:
        """Return tokens as text, with special tokens, but without the one that ends documents."""
        document = self.build.prepared.tokenizer.document_token
        kept = [one for one in ids if one != document]
        return self._encoder.decode(kept, skip_special_tokens=False)


def _end_of(template: ChatTemplate) -> str:
    """Return what a template writes behind an answer, blanks aside; "" where it is nothing."""
    probe = [{"role": "user", "content": "x"}, {"role": ASSISTANT, "content": PROBE}]
    return template.render(probe, None).text.partition(PROBE)[2].strip()
