"""Render conversations by a chat template, which is a program of somebody else's.

The environment is the one of `transformers` (Jinja2's immutable sandbox, `{% generation %}`,
`tojson`, `raise_exception`, `strftime_now`), so that the text is the same. A sandbox keeps a
template from the process that runs it, and not from its time and memory: here each loop, call and
filter is counted, and no value grows past a limit. The limits are counts, not seconds, so that a
template is refused on every machine or on none.

Source: transformers' `utils/chat_template_utils.py`, whose names a template may use.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import wraps
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_STEPS = 1 << 16
"""Turns of loops, calls and filters of one rendering. A conversation of 1,000 turns takes 6,000
under the templates of today's models."""
MOST_CHARACTERS = 1 << 24
"""Characters that one rendering writes, and of one value that it makes."""
MOST_ITEMS = 1 << 18
"""Items of one value that a template makes, those of what it holds included."""
MOST_WORK = 1 << 26
"""Product of the sizes of what one operation is given, which bounds what it can make."""
ITEMS_A_STEP = 64
"""Items that are looked at in the time of a step."""
_WIDTH = re.compile(r"\d{6,}|%[^a-zA-Z%]*\*|\{[^}]*\{")
"""A width in a format string that pads to a million characters, or that is itself a value."""
Sized = str | bytes | list | tuple | dict
CHATML_TEXT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The built-in template: ChatML, with the end of its turn in what the assistant writes."""
_CONTEXTS = (jinja2.Environment, jinja2.runtime.Context, nodes.EvalContext)
"""What jinja gives to filters that ask for it, before their value."""


class TemplateRefused(ValueError):
    """A template cannot be read, fails, refuses a conversation, or does too much.

    Args:
        reason: what is wrong, in words.
        by_template: whether the template itself refuses the conversation (`raise_exception`).
    """

    def __init__(self, reason: str, *, by_template: bool = False) -> None:
        super().__init__(reason)
        self.by_template = by_template


class _Raised(jinja2.TemplateError):
    """Say that the template called `raise_exception`."""


@dataclass
class _Budget:
    """What one rendering has used so far, and where it wrote answers."""

    steps: int = 0
    characters: int = 0
    today: date = field(default_factory=lambda: date(1970, 1, 1))
    written: int = 0
    """Characters of the text so far, outside of blocks that are being made."""
    answers: list[tuple[int, int]] = field(default_factory=list)

    def step(self, count: int = 1) -> None:
        """Count what takes time.

        Raises:
            SecurityError: it is too much.
        """
        self.steps += count
        if self.steps > MOST_STEPS:
            raise SecurityError(f"it takes more than {MOST_STEPS:,} steps")

    def sized(self, value: Any) -> Any:
        """Return a value that a template made, whose size is within the limits.

        Raises:
            SecurityError: it, or all that it holds, is too large.
        """
        if isinstance(value, str | bytes):
            if len(value) > MOST_CHARACTERS:
                raise SecurityError(f"it makes a value of {len(value):,} characters")
        elif isinstance(value, list | tuple | dict):
            self._weigh(value)
        return value

    def _weigh(self, value: Any) -> int:
        """Return the characters of what a value holds; an item that it holds twice counts twice."""
        stack, items, characters = [value], 0, 0
        while stack:
            one = stack.pop()
            items += 1
            if isinstance(one, str | bytes):
                characters += len(one)
            elif isinstance(one, dict):
                stack.extend(one)
                stack.extend(one.values())
            elif isinstance(one, list | tuple):
                stack.extend(one)
            if items + len(stack) > MOST_ITEMS or characters > MOST_CHARACTERS:
                raise SecurityError(
                    f"it makes a value of over {MOST_ITEMS:,} items or {MOST_CHARACTERS:,} "
                    "characters"
                )
        self.step(items // ITEMS_A_STEP)
        return items + characters

    def write(self, value: Any) -> Any:
        """Return what is written, counted.

        Raises:
            SecurityError: more was written than one rendering may.
        """
        if isinstance(value, Sized):
            self.characters += len(value) if isinstance(value, str) else self._weigh(value)
            if self.characters > MOST_CHARACTERS:
                raise SecurityError(f"it writes more than {MOST_CHARACTERS:,} characters")
        return value

    def check_work(self, first: Any, others: Iterable[Any] = ()) -> None:
        """Refuse an operation whose result could be too large.

        Args:
            first: the text or list that it makes something of.
            others: what else it is given: texts, and numbers such as a width.

        Raises:
            SecurityError: the product of their sizes is too large.
        """
        if not isinstance(first, Sized):
            return
        work = max(1, len(first))
        for value in others:
            if isinstance(value, Sized):
                work *= max(1, len(value))
            elif isinstance(value, int):
                work *= max(1, abs(value))
        if work > MOST_WORK:
            raise SecurityError(f"one operation of it is given {work:,} things to make")


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`: what stands in it is written by the model."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.CallBlock:
        """Make the block a call that notes where its text begins and ends."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_note"), [], [], body)
        block.set_lineno(line)
        return block

    def _note(self, caller: Callable[[], str]) -> str:
        text, budget = caller(), self.environment.budget  # type: ignore[attr-defined]
        budget.answers.append((budget.written, budget.written + len(text)))
        return text


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, which counts what a template does."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            autoescape=False,
            optimized=False,  # else constants are computed while it is read, before any count
        )
        self.budget = _Budget()
        self.filters["tojson"] = _to_json
        self.filters = {name: self._counted(made) for name, made in self.filters.items()}
        self.filters["format"] = self._format
        self.filters["_rounds"] = self._rounds
        self.filters["_write"] = lambda value: self.budget.write(value)
        self.filters["_sized"] = lambda value: self.budget.sized(value)
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = self._today
        self.globals["namespace"] = _Namespace
        self.globals.pop("lipsum", None)

    def _counted(self, made: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(made)  # keeps the marks by which jinja passes its context
        def call(*given: Any, **named: Any) -> Any:
            self.budget.step()
            own = [_listed(one) for one in given if not isinstance(one, _CONTEXTS)]
            for first in own[:1]:
                self.budget.check_work(first, (*own[1:], *named.values()))
            return self.budget.sized(made(*given[: len(given) - len(own)], *own, **named))

        return call

    def _format(self, written: Any, *given: Any, **named: Any) -> Any:
        """Return a text with values in it, as `%` makes it; a number is one of them, no width."""
        self.budget.step()
        _check_widths(text := str(written))
        return self.budget.sized(text % (named or given))

    def wrap_str_format(self, value: Any) -> Any:
        """Return the sandbox's own `str.format`, which pads to no great width."""
        if (safe := super().wrap_str_format(value)) is not None:
            _check_widths(value.__self__)
        return safe

    def _rounds(self, items: Any) -> Any:
        """Count the turns of a loop; what has a length keeps it, for `loop.last`."""
        if isinstance(items, str | list | tuple | dict | range):
            self.budget.step(len(items))
            return items
        return self._counting(items) if isinstance(items, Iterable) else items

    def _counting(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.budget.step()
            yield item

    def _today(self, written: str) -> str:
        self.budget.check_work(str(written), [64])
        return self.budget.today.strftime(written)

    def call(self, __context: Any, __obj: Any, *given: Any, **named: Any) -> Any:
        """Call what a template calls, counted."""
        self.budget.step()
        owner = getattr(__obj, "__self__", None)
        self.budget.check_work(owner, (*given, *named.values()))
        return self.budget.sized(super().call(__context, __obj, *given, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute what a template computes, within the limits."""
        self.budget.step()
        if operator == "*":
            self.budget.check_work(left, [right])
            self.budget.check_work(right, [left])
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
            self.budget.check_work(left, right if isinstance(right, tuple) else [])
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.budget.check_work([left], [left.bit_length(), right])
        return self.budget.sized(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Read a template, and count each loop and each thing that it writes."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(cast("nodes.Expr", loop.iter), "_rounds")
        for output in list(tree.find_all(nodes.Output)):
            output.nodes = [_filtered(node, "_write") for node in output.nodes]
        for joined in list(tree.find_all(nodes.Concat)):
            joined.nodes = [_filtered(node, "_sized") for node in joined.nodes]
        for kind in (nodes.List, nodes.Tuple, nodes.Dict):
            for made in list(tree.find_all(kind)):
                if getattr(made, "ctx", "load") == "load":
                    _replace(tree, made, _filtered(made, "_sized"))
        return tree


def _filtered(node: nodes.Expr, name: str) -> nodes.Expr:
    if isinstance(node, nodes.TemplateData):
        node = nodes.Const(node.data, lineno=node.lineno)
    made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    made.set_environment(node.environment)  # type: ignore[arg-type]
    return made


def _replace(tree: nodes.Node, old: nodes.Node, new: nodes.Node) -> None:
    """Put a node in the place of another."""
    stack = [tree]
    while stack:
        parent = stack.pop()
        for name, value in parent.iter_fields():
            if value is old:
                setattr(parent, name, new)
                return
            if isinstance(value, list) and any(one is old for one in value):
                value[:] = [new if one is old else one for one in value]
                return
        stack.extend(parent.iter_child_nodes())


def _listed(value: Any) -> Any:
    """Return the items of a stream as a list, whose size is known."""
    return list(value) if isinstance(value, Iterator | range) else value


def _check_widths(written: str) -> None:
    """Refuse a format string that pads to a width of a million characters."""
    if wide := _WIDTH.search(written):
        raise SecurityError(f"it formats a value to the width {wide.group()!r}")


def _raise(reason: Any) -> None:
    raise _Raised(str(reason))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; Jinja2's own escapes what HTML would read."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Namespace(jinja2.utils.Namespace):
    """A template's own variables, whose names do not begin with an underscore."""

    def __init__(*given: Any, **named: Any) -> None:
        self, rest = given[0], given[1:]
        for name in (values := dict(*rest, **named)):
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it stores the name {name!r}, which begins with an underscore")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and what of it the template says that the model writes."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Characters [begin, end) of each `{% generation %}` block, in order."""


class ChatTemplate:
    """A chat template that is ready to render.

    Args:
        text: the template.
        names: what it reads beside the messages, such as `bos_token`.
        today: what it is told that the date is.

    Raises:
        TemplateRefused: it is no template.
    """

    def __init__(self, text: str, names: Mapping[str, str], today: date) -> None:
        self.text, self.names, self._today = text, dict(names), today
        self._environment = _Sandbox()
        try:
            tree = self._environment.parse(text)
            self.marks_answers = any(True for _ in _generations(tree))
            self._template = self._environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateRefused(f"line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, ValueError) as error:
            raise TemplateRefused(str(error)) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Return a conversation as text.

        Args:
            messages: dictionaries with `role`, `content` and whatever else the template reads.
            tools: JSON schemas of what the assistant may call.
            add_generation_prompt: whether the beginning of an answer is written after them.

        Raises:
            TemplateRefused: the template refuses it, fails, or does too much.
        """
        budget = self._environment.budget = _Budget(today=self._today)
        parts: list[str] = []
        try:
            for part in self._template.generate(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.names,
            ):
                parts.append(part)
                budget.written += len(part)
        except _Raised as error:
            raise TemplateRefused(str(error), by_template=True) from None
        except RecursionError:
            raise TemplateRefused("it calls itself too often") from None
        except Exception as error:  # whatever a template does with what it is given
            raise TemplateRefused(str(error) or type(error).__name__) from None
        return Rendered("".join(parts), tuple(budget.answers))


def _generations(tree: nodes.Template) -> Iterator[nodes.CallBlock]:
    """Yield the `{% generation %}` blocks of a template."""
    for block in tree.find_all(nodes.CallBlock):
        named = block.call.node
        if isinstance(named, nodes.ExtensionAttribute) and named.name == "_note":
            yield block
