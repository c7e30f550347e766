from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compressor.errors import RecipeError, UserInputError
from compressor.object_reference import own_names, resolve, subclass_names


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "referenced_by_a_test.py"
    path.write_text("from pathlib import Path\n\nclass Outer:\n    @staticmethod\n    def inner():\n        return 7\n\nMADE = Outer()\n")
    yield path
    sys.modules.pop(path.stem, None)


def test_a_dotted_name_is_found_with_its_owner(module: Path) -> None:
    place = resolve("referenced_by_a_test:Outer.inner", "function")
    assert place.owner.__name__ == "Outer" and place.name == "inner"
    assert place.value() == 7
    assert isinstance(place.stored, staticmethod)


def test_a_file_is_taken_where_it_may_be(module: Path) -> None:
    assert resolve(f"{module}:MADE", "subject", files=True).value.inner() == 7
    with pytest.raises(UserInputError, match="cannot be imported"):
        resolve(f"{module}:MADE", "subject")


def test_the_caller_chooses_the_error_its_begin_and_the_names_that_are_suggested(module: Path) -> None:
    with pytest.raises(RecipeError, match=r"^args: referenced_by_a_test has no 'MAD'; did you mean 'MADE'\?"):
        resolve("referenced_by_a_test:MAD", "object", where="args", error=RecipeError, names=own_names)
    with pytest.raises(UserInputError, match=r"choose from Path$"):
        resolve("referenced_by_a_test:xyzzy", "path", names=subclass_names(Path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nothing", "this names no subject; write package.module:Name or path/to/file.py:Name"),
        ("mine.py", "write mine.py:Name"),
        ("empty_reference_of_a_test:Name", "has no 'Name'; it has no name at all; give another"),
        (":Name", "its module '' cannot be imported"),
        ("no_such_module:Name", "its module 'no_such_module' cannot be imported"),
        ("no/such.py:Name", "there is no such file; correct the path"),
        ("broken_reference_of_a_test:Name", "fails while it is imported (SystemExit: 3); make it importable first"),
    ],
)
def test_what_leads_nowhere_says_why(text: str, problem: str, module: Path) -> None:
    module.with_name("empty_reference_of_a_test.py").write_text("")
    module.with_name("broken_reference_of_a_test.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UserInputError) as caught:
        resolve(text, "subject", files=True)
    assert str(caught.value).startswith(f"{text}: ") and problem in str(caught.value)
