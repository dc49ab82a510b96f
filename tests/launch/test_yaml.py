"""What is written as YAML is read back by the package that others read it with."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.launch.yaml import to_yaml

CHARACTERS = st.characters(exclude_categories=["Cs"])
"""All that UTF-8 has; hypothesis encodes each of a million in turn where a codec says so."""
WORDS = st.text(CHARACTERS, max_size=12) | st.sampled_from(
    ["no", "1e3", "a\nb\n", " a\nb\n", "-", "~", "a: b"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(WORDS, VALUES, max_size=4))
def test_any_table_is_read_back(value: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize("text", ["a\nb\n", "a\n\n  b\n", "a\nb", "a\nb\n\n", "\ta\nb\n", "\na\n"])
def test_texts_of_several_lines_are_read_back(text: str) -> None:
    assert yaml.safe_load(to_yaml({"a": [text, {"b": text}]})) == {"a": [text, {"b": text}]}
