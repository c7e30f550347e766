"""Checks of the catalogue that other parts of the harness hold: where each lives, and which command runs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Elsewhere:
    """A numbered check that is no function of this catalogue.

    Attributes:
        number: in the catalogue.
        title: the statement, as a sentence.
        lives: the file that holds it.
        command: what runs it.
        caught_by: public bugs that it would have caught.
    """

    number: int
    title: str
    lives: str
    command: str
    caught_by: tuple[str, ...] = ()


_VERIFY = "harness verify PACKAGE.MODULE:MODIFIER"

ELSEWHERE: tuple[Elsewhere, ...] = (
    Elsewhere(47, "An illegal call raises and changes nothing", "harness/lifecycle/checks_order.py", _VERIFY),
    Elsewhere(
        48, "Callbacks come exactly at start and end, for whole and fractional indices", "harness/lifecycle/checks_order.py", _VERIFY
    ),
    Elsewhere(
        49,
        "No hook, observer or patched attribute is left outside calibration, after an exception too",
        "harness/lifecycle/checks_traces.py",
        _VERIFY,
        ("aimet#4115",),
    ),
    Elsewhere(
        50,
        "Contexts nest: leaving an inner disable_hooks() does not wake the hooks of the outer one",
        "harness/lifecycle/checks_order.py",
        _VERIFY,
    ),
    Elsewhere(
        51,
        "RNG state, training flags, requires_grad, use_cache, dtype and config are as before",
        "harness/lifecycle/checks_traces.py",
        _VERIFY,
    ),
    Elsewhere(52, "Applying to an already quantized model raises", "harness/lifecycle/checks_traces.py", _VERIFY),
    Elsewhere(
        53,
        "parse(dump(recipe)) == recipe, with two modifiers of one type in a stage too",
        "harness/lifecycle/checks_recipe.py",
        _VERIFY,
        ("llm-compressor#2805",),
    ),
    Elsewhere(
        54,
        "A failure in the middle rolls back, or leaves a directory that no loader takes for a finished checkpoint",
        "harness/lifecycle/checks_traces.py",
        _VERIFY,
    ),
    Elsewhere(
        61,
        "onnxruntime with optimizations off agrees with all: relative 1e-5, but for a declared policy",
        "harness/onnx_graph/roundtrip.py",
        "harness onnx roundtrip",
    ),
    Elsewhere(
        62,
        "Three separate Q/K/V projections survive under the declared skips, and are fused without them",
        "harness/onnx_graph/role_contracts.py",
        "harness onnx roundtrip",
    ),
    Elsewhere(
        63,
        "Eager, capture and replay give the same bits, on batches unseen at capture and with outputs spoiled first; all state compared",
        "harness/replay/equivalence.py",
        "harness replay MODEL",
        ("pytorch#84614", "pytorch#114844", "pytorch#181723", "burn#5779", "TransformerEngine#2937"),
    ),
)
