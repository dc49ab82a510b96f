"""A chat template cannot leave its sandbox, run on, or fill the memory."""

from datetime import date

import pytest

from headrace.data.chat.template import ChatTemplate, TemplateRefused

DOUBLED = "{% set ns = namespace(s='0123456789') %}{% for i in range(60) %}{% set ns.s = %s %}"
ENDLESS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
)
LARGE = (
    DOUBLED.replace("%s", "ns.s + ns.s") + "{% endfor %}",
    DOUBLED.replace("%s", "ns.s ~ ns.s") + "{% endfor %}",
    DOUBLED.replace("%s", "ns.s|replace('0', '00')") + "{% endfor %}",
    DOUBLED.replace("%s", "[ns.s, ns.s]") + "{% endfor %}{{ ns.s|tojson }}",
    "{% set ns = namespace(s='0123456789') %}{% for i in range(60) %}"
    "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{{ 'a' * 9999999999 }}",
    "{{ [1] * 9999999999 }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ 'a'|center(9999999999) }}",
    "{{ 'a'|indent(9999999999) }}",
    "{{ '%9999999999d'|format(1) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 9999999999) }}",
    "{{ range(9999)|map('string')|join('a' * 99999) }}",
    "{{ 9 ** 99999999 }}",
)
ESCAPES = (
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{% set ns = namespace(_a=1) %}",
    "{% include 'other' %}",
    "{{ raise_exception('no') }}",
)


@pytest.mark.parametrize("text", [*ENDLESS, *LARGE, *ESCAPES])
def test_what_a_template_may_not_do_is_refused(text: str) -> None:
    """By counts, so on any machine alike, and before the memory is taken."""
    with pytest.raises(TemplateRefused) as refused:
        ChatTemplate(text, {}, date(2024, 7, 26)).render([{"role": "user", "content": "a"}])
    assert not isinstance(refused.value.__cause__, MemoryError)
    assert "MemoryError" not in str(refused.value)
    assert refused.value.by_template == ("raise_exception" in text)


def test_what_a_template_reads() -> None:
    """It is told a date that is always the same, large numbers are no widths, and loops end."""
    text = (
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{% if loop.last %}last"
        "{% else %}{% continue %}{% endif %}{{ m.at|tojson }}{{ m.at|string }}"
        "{{ '%d'|format(m.at) }}{% endfor %}{{ bos_token }}{{ ''.__class__ }}"
        "{{ [messages[0]] + messages[1:]|length|string|list }}"
    )
    messages = [{"role": "user", "at": 1}, {"role": "user", "at": 10**12}]
    made = ChatTemplate(text, {"bos_token": "<s>"}, date(2024, 7, 26)).render(messages).text
    assert made.startswith("26 Jul 2024last" + "1000000000000" * 3 + "<s>[{'role'")
