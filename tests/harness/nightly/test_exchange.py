"""What was exported and damaged on its way is told, or read as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.errors import UserInputError
from harness.nightly.environment import Environment
from harness.nightly.exchange import read_tables
from harness.nightly.history import History


@pytest.mark.parametrize("ending", ["zip", "parquet"])
def test_a_flipped_bit_is_told_or_changes_nothing(ending: str, tmp_path: Path) -> None:
    history = History(tmp_path / "history.sqlite")
    for night in range(3):
        history.add("a", [0.1 + night, 1 / 3], environment=Environment({"cpu": "one"}), night=str(night))
    path = tmp_path / f"all.{ending}"
    history.export(path)
    whole, held = path.read_bytes(), read_tables(path)
    refused = 0
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at // 3 % 8]) + whole[at + 1 :])
        try:
            assert read_tables(path) == held, f"bit {at // 3 % 8} of byte {at} is read otherwise"
        except UserInputError:
            refused += 1
    assert refused > len(whole) // 12
