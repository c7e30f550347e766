"""Names of a package are found where they are defined, and no others."""

from __future__ import annotations

import pytest

from compressor.lazy_names import lazy_names


def test_a_name_is_imported_from_its_home_and_others_are_no_attributes() -> None:
    look_up, names = lazy_names("some.package", {"dumps": "json", "Path": "pathlib"})
    assert look_up("dumps")([1]) == "[1]"
    assert names() == ["Path", "dumps"]
    with pytest.raises(AttributeError, match=r"module 'some\.package' has no attribute 'loads'"):
        look_up("loads")
