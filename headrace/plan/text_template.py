"""Read a template of a row's text: names of fields in braces, and what stands between them."""

from string import Formatter
from typing import Annotated

from pydantic import AfterValidator, ValidationInfo

from headrace.core.remedy import mend
from headrace.core.strict import Wrong

TemplateParts = tuple[tuple[str, str | None], ...]
"""(Text, name of the field that follows it, or None at the end)."""


def template_parts(template: str) -> TemplateParts:
    """Return the parts of a template.

    Braces that are doubled stand for themselves. Nothing of a template is executed: a name is a
    field, and has neither a format nor a conversion.

    Raises:
        Wrong: the template names no field, or a name is no plain one.
    """
    try:
        parsed = [*Formatter().parse(template)]
    except ValueError as error:
        raise _wrong(f"{template!r} is no template: {error}") from None
    for _, name, form, conversion in parsed:
        if name is not None and (not name.strip() or form or conversion or "[" in name):
            raise _wrong(f"{template!r} has braces that hold no plain name of a field")
    parts = tuple((literal, name) for literal, name, _, _ in parsed)
    if not any(name for _, name in parts):
        raise _wrong(f"{template!r} names no field of a row")
    return parts


def _wrong(message: str) -> Wrong:
    return Wrong(message, mend("data.text_template={text}"))


def check_template(template: str, info: ValidationInfo) -> str:
    """Return the value of `data.text_template` where it is one, and alone says what the text is.

    Raises:
        Wrong: it is none, or `data.text_key` names a field, too.
    """
    if template:
        template_parts(template)
        if (key := info.data.get("text_key", "text")) != "text":
            raise Wrong(
                f"{template!r} says which fields are the text, and data.text_key = {key!r} too",
                mend("data.text_key=text"),
            )
    return template


TextTemplate = Annotated[str, AfterValidator(check_template)]
"""A template of a row's text, or "" for none."""
