"""JSON and YAML that others wrote, and what their errors say: whatever is wrong with them is one kind of error, in words."""

from __future__ import annotations

import pytest
import torch

from compressor.errors import UserInputError, reason
from compressor.json_text import MAX_DEPTH, from_json
from compressor.yaml_text import from_yaml

JSON = {
    "no JSON": ("{", "Expecting property name"),
    "no text": (b"\xff", "invalid start byte"),
    "too deep for Python": ("[" * 100_000, "its entries are nested too deeply"),
    "too deep for what comes later": ("[" * 300 + "]" * 300, "its entries are nested too deeply"),
    "number": ("9" * 5_000, "digits"),
    "twice": ('{"a": {"b": 1, "b": 2}}', "'b' stands twice in one object"),
}


@pytest.mark.parametrize("name", JSON)
def test_json_that_cannot_be_read_is_a_value_error(name: str) -> None:
    text, message = JSON[name]
    with pytest.raises(ValueError, match=message):
        from_json(text, once=True)


def test_json_is_data_and_a_key_may_stand_twice_unless_once_is_asked_for() -> None:
    assert from_json('{"a": [1, {"b": null}], "a": 2}') == {"a": 2}
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert str(from_json(deep)) == deep


def test_yaml_is_data_with_its_lines() -> None:
    data, lines = from_yaml("a:\n  - 1e-3\n  - b: yes\n", "x")
    assert data == {"a": [0.001, {"b": True}]}
    assert lines == {("a",): 1, ("a", 0): 2, ("a", 1): 3, ("a", 1, "b"): 3}
    assert from_yaml("", "x") == (None, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n  b: 1\n  no: 2", r'^x:3: no: is no text, YAML reads it as bool; write "no"$'),
        ("a: [{4: x}]", r'^x:1: 4: is no text, YAML reads it as int; write "4"$'),
        ("~: x", r"^x:1: ~: is no text, YAML reads it as null"),
    ],
)
def test_keys_may_have_to_be_texts(text: str, message: str) -> None:
    assert from_yaml(text, "x")
    with pytest.raises(UserInputError, match=message):
        from_yaml(text, "x", text_keys=True)
    assert from_yaml('"no": 1\nyes-man: {<<: {b: 2}}', "x", text_keys=True)[0] == {"no": 1, "yes-man": {"b": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!python/object/apply:os.system [x]", r"^x:1: this is not safe YAML"),
        ("a: [", r"^x:1: this is not safe YAML"),
        ("a: " + "[" * 1_000, r"^x: its entries are nested too deeply"),
        ("a: 1\nb: 1\na: 2", r"^x:3: 'a' stands twice in one mapping; keep one"),
        ("a: [{b: 1, b: 2}]", r"^x:1: 'b' stands twice"),
        ("a: " + "9" * 5_000, r"^x:1: this is not safe YAML \('9{40}': Exceeds the limit"),
        ("a: 1\nb: 2027-02-31", r"^x:2: this is not safe YAML \('2027-02-31': day is out of range for month\); correct the text$"),
        ("a: &a [*a]", r"^x:1: the aliases in this text expand without bounds"),
    ],
)
def test_yaml_that_cannot_be_read_is_bad_input(text: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        from_yaml(text, "x")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", ""),
        ("it is wrong.\nat line 3", "it is wrong"),
        ("two are missing:\n  a, b\nat line 3", "two are missing: a, b"),
        (f"the module {torch.nn.Sequential(torch.nn.ReLU())} is wrong\nat line 3", "the module Sequential(...) is wrong"),
        ('the config Config {\n  "a": {\n    "b": 1\n  }\n}\n was made for 1.\nat line 3', "the config Config {...} was made for 1"),
        ("the sizes {\nat line 3", "the sizes {"),
    ],
)
def test_the_reason_of_an_error_is_one_line_and_whole(message: str, said: str) -> None:
    assert reason(ValueError(message)) == said
