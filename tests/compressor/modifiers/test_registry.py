"""A name in a recipe leads to a class by four ways, and a wrong name to advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.errors import RecipeError
from compressor.lifecycle import Modifier, State
from compressor.modifiers import registry
from compressor.modifiers.registry import find_modifier, known_modifiers, modifier_name, register_modifier


class Own(Modifier):
    """A third party's modifier."""

    def on_initialize(self, state: State) -> bool:
        return True


class Outer:
    class Inner(Own):
        """A class inside a class."""


class Unfinished(Modifier):
    """Still abstract."""


NOT_A_CLASS = "text"
PATH = f"{__name__}:Own"


@pytest.fixture(autouse=True)
def _clean_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, *points: str) -> None:
    """Put a distribution with entry points on the path."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[compressor.modifiers]\n" + "\n".join(points) + "\n")
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize("name", sorted(registry.MODIFIERS))
def test_every_name_of_the_table_means_a_class_of_that_name(name: str) -> None:
    cls = find_modifier(name)
    assert cls.__name__ == name
    assert modifier_name(cls) == name


@pytest.mark.parametrize(
    ("given", "meant"),
    [("GPTQModifer", "GPTQModifier"), ("gptqmodifier", "GPTQModifier"), ("QuantisationModifier", "QuantizationModifier")],
)
def test_a_wrong_name_is_answered_with_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(RecipeError, match=rf"^{given}: there is no such modifier; did you mean '{meant}'\?"):
        find_modifier(given)


def test_a_hopeless_name_is_answered_with_all_of_them() -> None:
    with pytest.raises(RecipeError, match="choose from ") as caught:
        find_modifier("xyzzy")
    assert all(name in str(caught.value) for name in registry.MODIFIERS)


def test_a_registered_class_is_found_by_its_name() -> None:
    assert register_modifier(Own) is Own
    register_modifier(Own)  # the same class again is no conflict
    assert find_modifier("Own") is Own
    assert "Own" in known_modifiers()
    assert modifier_name(Own) == "Own"


def test_a_name_cannot_be_taken_twice() -> None:
    other, builtin = type("Own", (Own,), {"__module__": __name__}), type("GPTQModifier", (Own,), {"__module__": __name__})
    register_modifier(Own)
    for cls in (other, builtin):
        with pytest.raises(RecipeError, match="another modifier already"):
            register_modifier(cls)
    assert find_modifier("Own") is Own
    assert modifier_name(other) == PATH
    assert modifier_name(builtin) == f"{__name__}:GPTQModifier"


@pytest.mark.parametrize(
    ("given", "problem"), [(Path, "no subclass"), (Own(), "no subclass"), (Unfinished, "is abstract; define on_initialize")]
)
def test_only_finished_modifier_classes_can_be_registered(given: type[Modifier], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        register_modifier(given)


@pytest.mark.parametrize("name", [PATH, f"{__name__}:Outer.Inner"])
def test_a_class_is_found_by_module_and_name(name: str) -> None:
    cls = find_modifier(name)
    assert modifier_name(cls) == name
    assert ":" not in "".join(known_modifiers())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no.such.module:Own", "its module 'no.such.module' cannot be imported"),
        (":Own", "cannot be imported"),
        (f"{__name__}:Owm", "did you mean 'Own'"),
        (f"{__name__}:", "choose from Own"),
        (f"{__name__}:xyzzy", "choose from Own"),
        (f"{__name__}:Outer.Nothing", "has no 'Outer.Nothing'"),
        (f"{__name__}:NOT_A_CLASS", "no subclass of compressor.lifecycle.Modifier"),
        (f"{__name__}:Outer", "no subclass"),
        (f"{__name__}:Unfinished", "abstract"),
    ],
)
def test_a_path_that_leads_nowhere_says_why(name: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=f"^{name}: ") as caught:
        find_modifier(name)
    assert problem in str(caught.value)
    assert "Unfinished" not in str(caught.value) or "Unfinished" in name
    assert "Path" not in str(caught.value)


def test_an_installed_package_brings_modifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "thirdparty", f"Own = {PATH}", f"Nickname = {PATH}", "Broken = no.such.module:Own")
    assert {"Own", "Nickname", "Broken"} <= set(known_modifiers())
    assert find_modifier("Own") is Own
    assert find_modifier("Nickname") is Own
    assert modifier_name(Own) == "Own"
    with pytest.raises(RecipeError, match="Broken: its module"):
        find_modifier("Broken")


def test_packages_that_claim_one_name_are_told_apart_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "a", monkeypatch, "first", f"Own = {PATH}")
    install(tmp_path / "b", monkeypatch, "second", f"Own = {__name__}:Outer.Inner")
    with pytest.raises(RecipeError, match=r"Own: installed packages claim this name for .*Outer.Inner, .*:Own;"):
        find_modifier("Own")
    assert modifier_name(Own) == PATH


def test_an_installed_package_cannot_take_the_place_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "shadow", f"GPTQModifier = {PATH}")
    assert find_modifier("GPTQModifier") is not Own
    assert known_modifiers().count("GPTQModifier") == 1


def test_a_class_inside_a_function_has_a_name_for_the_record() -> None:
    class Local(Own):
        pass

    name = modifier_name(Local)
    assert name.startswith(f"{__name__}:test_a_class_inside")
    with pytest.raises(RecipeError, match="<locals>"):
        find_modifier(name)
