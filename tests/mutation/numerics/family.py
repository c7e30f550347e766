"""Planted bugs in quantizers, packers, observers, layers and solvers, against the numeric catalogue on our own subjects.

A killer is one check, shown a few subjects without random draws: each bug has to fall to fixed inputs, which take milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from harness.checks import ours
from harness.checks.catalogue.registry import CheckContext, find_checks
from harness.mutants.family import Family, Killer, LookBroke
from harness.mutants.patches import Mutant
from harness.reporting.verdict import Outcome
from tests.mutation.numerics.codes import QUANTIZER_MUTANTS
from tests.mutation.numerics.experts import EXPERT_MUTANTS
from tests.mutation.numerics.moved_scales import MOVED_SCALE_MUTANTS
from tests.mutation.numerics.pruners import PRUNER_MUTANTS
from tests.mutation.numerics.rotations import ROTATION_MUTANTS
from tests.mutation.numerics.scales import SCALE_MUTANTS
from tests.mutation.numerics.solvers import SOLVER_MUTANTS
from tests.mutation.numerics.storage import LAYER_MUTANTS, OBSERVER_MUTANTS, PACKER_MUTANTS

# Of our subjects by kind, those that differ in the code that they run; the tests of the catalogue look at all of them.
_NAMES: dict[str, tuple[str, ...]] = {
    "quantizer": (
        "int4-group16",
        "int8-asym-group16",
        "int8-channel",
        "fp8-tensor",
        "fp8-block4x8",
        "fp4-tensor_group16",
        "fp4-group32-mx",
        "int8-asym-token-dynamic",
        "int4-group16-mse",
    ),
    "packer": ("pack_int32-3bit-dim1", "pack_int32-4bit-dim1", "pack_int32-5bit-dim0", "pack_int32-8bit-dim1", "pack_fp4"),
    "layer": (
        "layer-int3-asym-group16-pack-quantized",
        "layer-int4-asym-group16-pack-quantized-g_idx",
        "layer-int8-channel-int8-tensor-int-quantized",
        "layer-int8-channel-int8-asym-tensor-int-quantized-native",
        "layer-fp8-channel-fp8-token-dynamic-float-quantized-native",
        "layer-fp4-tensor_group16-nvfp4-pack-quantized",
        "layer-fp4-group32-mx-mxfp4-pack-quantized",
    ),
    "transform": ("SmoothQuant", "AWQ-norms", "AWQ"),
    "rotation": ("SpinQuant-random", "SpinQuant-R1", "SpinQuant-R4", "QuIP"),
    "solver": (
        "gptq-r_form-int4-group16-actorder",
        "gptq-reference-int4-asym-group16-plain",
        "gptq-r_form-int3-group16-g_idx",
        "gptq-r_form-int4-asym-group16-actorder-search",
        "gptq-r_form-fp8-block5x8-actorder",
    ),
}


# Bugs that not the first subjects see, by a word in the name of one that does: it is shown first, since one that sees nothing
# takes up to two seconds.
_SEEN_BY = {
    "int8-channel": ("range_of_256_values", "one_scale_for_all_rows"),
    "int8-asym-group": (
        "zero_left_out_above",
        "zero_left_out_below",
        "zero_point_added_back",
        "zero_point_before_the_scale",
        "zero_point_cut_off",
        "zero_point_from_the_maximum",
        "zero_point_ignored",
        "zero_point_not_clamped",
        "zero_point_of_the_other_sign",
        "zero_point_subtracted",
    ),
    "int8-asym-token": ("scale_of_each_sequence",),
    "-mse": ("search_for_all_groups",),
    "fp8": ("fp8_overflows", "fp8_clamped_at_240", "fp8_cut_off", "formats_follow_the_model"),
    "fp8-block": ("blocks_turned", "blocks_not_gathered"),
    "fp4": ("fp4_steps_end_early", "fp4_ties_up", "fp4_loses_the_sign"),
    "fp4-tensor": (
        "global_scale_overflows",
        "global_scale_upside_down",
        "global_scale_without_the_codes",
        "global_scale_forgotten",
        "nvfp4_scale_not_stored_so",
    ),
    "-mx": ("mx_exponent_off_by_one", "mx_rounds_down", "mx_rounds_at_the_middle", "mx_one_exponent_up"),
    "5bit": ("rows_not_turned_back", "words_not_contiguous"),
    "pack_fp4": ("nibbles_swapped_both_ways", "nibbles_packed_swapped", "fp4_loses_signs", "fp4_table_out_of_order"),
    "g_idx": ("g_idx_ignored",),
    "int-quantized": ("input_not_quantized", "plain_scale_in_bfloat16", "static_input_scale_ignored"),
    "int8-asym-tensor-int": (
        "plain_zero_point_kept_away",
        "codes_times_one_scale",
        "dtype_lost",
        "int8_product_wraps",
        "bias_dropped_natively",
    ),
    "asym-tensor-resumed": ("state_turned_around",),
}


def _subjects(kind: str, names: str, first: str = "") -> list[Any]:
    every: Sequence[Any] = ours.SUBJECTS
    found = [subject for subject in every if subject.kind == kind]
    wanted = _NAMES.get(names)
    return sorted((one for one in found if wanted is None or one.name in wanted), key=lambda one: first not in one.name)


def killers(kind: str, names: str, mutant: Mutant | None) -> Sequence[Killer]:
    """Return the checks of a kind, in their order.

    Args:
        kind: of the subjects.
        names: which of them, a key of the table.
        mutant: the bug that will be planted; every one is shown to all checks, and those subjects that see it look first.

    Returns:
        Those who look.
    """
    context = CheckContext(draws=False)  # one for each bug: what was seen of a subject without it says nothing
    first = [word for word, bugs in _SEEN_BY.items() if mutant is not None and mutant.name in bugs]
    subjects = _subjects(kind, names, *first)
    return [Killer(check.name, partial(_look, check.name, kind, subjects, context)) for check in find_checks(None, kind)]


def _look(name: str, kind: str, subjects: Sequence[Any], context: CheckContext) -> str | None:
    check = find_checks([name], kind)[0]
    for subject in subjects:
        record = check.run(subject, context)
        if record.outcome is Outcome.FAIL:
            if "the check could not be completed: " in record.summary:
                raise LookBroke(record.summary.partition("completed: ")[2])
            return f"{subject.name}: {record.summary}"
    return None


def _family(name: str, kind: str, mutants: Sequence[Mutant], names: str | None = None) -> Family:
    return Family(name, {mutant.name: mutant for mutant in mutants}, partial(killers, kind, names or kind))


QUANTIZERS = _family("quantizers", "quantizer", (*SCALE_MUTANTS, *QUANTIZER_MUTANTS))
PACKERS = _family("packers", "packer", PACKER_MUTANTS)
OBSERVERS = _family("observers", "observer", OBSERVER_MUTANTS)
LAYERS = _family("layers", "layer", LAYER_MUTANTS)
SOLVERS = _family("solvers", "solver", SOLVER_MUTANTS)
PRUNERS = _family("pruners", "sparsifier", PRUNER_MUTANTS)
MOVED_SCALES = _family("moved-scales", "transform", MOVED_SCALE_MUTANTS)
ROTATIONS = _family("rotations", "transform", ROTATION_MUTANTS, "rotation")
EXPERTS = _family("experts", "expert_pruner", EXPERT_MUTANTS)
