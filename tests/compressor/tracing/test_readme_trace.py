"""The example of `trace` in its chapter, run as it is printed, prints what is printed below it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
def test_the_example_of_trace_calibrates_and_prints_what_readme_says() -> None:
    text = (ROOT / "compressor" / "tracing" / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert found is not None
    code, printed = found.groups()
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.sub(r"\.py:\d+", ".py:N", done.stdout) == re.sub(r"\.py:\d+", ".py:N", printed)
    assert printed.count("model.layers.") == 4, "both layers see both batches"
