"""What is not promised, in the words in which README, `--help` and docstrings say it. Light: help imports it."""

from __future__ import annotations

NOT_SEEN = (
    "Not seen: recurrences (LSTM, GRU, RNN), a Loop, Scan or If without a matrix product, sorting, lookups of what a single layer chose "
    "(routers, detectors), messages along edges that are given, and sampling, Fourier transforms or repetition that other operators "
    "spell out"
)
"""What may mix activations and makes no block, so that contracts can hold beside it."""

EVIDENCE = (
    "An output that is constant, NaN everywhere, empty or drawn at random is no evidence; another type or shape, or NaN elsewhere, is "
    "a violation. An error passes if it has less than a billionth of an output's energy and less than a thousandth (3 % in amplitude) of "
    "each slice along an axis that it lies in; at 35 dB less than 1/3000, and a small slice may be wrong altogether"
)
"""What numeric-equal asks for, and where it ends."""

OUT_OF_REACH = (
    "An interpreter that ignores its environment (`python -I`, `-E`, `-S`) or is given another one runs no hook: inside of `forced_skips` "
    "it goes unnoticed beside a call that was seen, `harness onnx run` sees it"
)
"""What forced skips do not reach."""
