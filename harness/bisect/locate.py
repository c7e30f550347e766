"""The main path: load both models, search the layers, then the modules of each guilty one, and say who made them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.data import check_batches, load_dataset_source
from compressor.errors import DatasetError, ModelError, UserInputError
from compressor.model.folder import read_config, resolve_folder, some
from compressor.numerics.precision import widened_products
from compressor.progress import Progress, SilentProgress
from harness.bisect.attention import kv_format
from harness.bisect.blame import Blame, guilty_part, suspects, usual_sqnr, weight_sqnr, who_made
from harness.bisect.difference import MEASURES, Comparer, limit_from, shown
from harness.bisect.models import Pair, group_into_layers, load_pair
from harness.bisect.report import BisectReport, GuiltyLayer
from harness.bisect.reproduce import write_test
from harness.bisect.search import Culprit, half_of, search
from harness.validation.behaviour.scoring import TokenBatch, token_batches

_CHANCE = 1e-6
"""Nats, or noise over signal: what kernels that sum in another order may make."""

_OWN_KEYS = {"quantization_config", "transformers_version", "dtype", "torch_dtype", "_name_or_path"}


@widened_products()
def bisect(
    base: str | Path,
    compressed: str | Path,
    dataset: Any,
    *,
    measure: str = "kl",
    limit: float | None = None,
    num_samples: int = 8,
    max_seq_length: int = 128,
    device: str = "auto",
    progress: Progress | None = None,
) -> BisectReport:
    """Find the layer and module with which a compressed model begins to differ from its base.

    Args:
        base: folder of the base, or of a compressed checkpoint that was accepted; or its name on the hub.
        compressed: folder of the compressed checkpoint, or its name on the hub.
        dataset: any source that `compressor.data.load_dataset_source` reads.
        measure: kl (nats per token), loss (its increase) or sqnr (of the logits, dB).
        limit: above which, for sqnr below which, a difference counts; None: half of the whole difference.
        num_samples: sequences at most.
        max_seq_length: tokens of a sequence at most.
        device: where both models run: auto, cpu, cuda.
        progress: shows bars.

    Returns:
        The report.

    Raises:
        ModelError: a folder that cannot be used, two architectures, or models that differ outside of their modules.
        DatasetError: data that cannot be used.
        UserInputError: another measure, or a limit that is no number above 0.
    """
    if measure not in MEASURES:
        raise UserInputError(f"bisect: measure={measure!r} does not exist; give one of {', '.join(MEASURES)}")
    if limit is not None and not 0 < limit < math.inf:
        raise UserInputError(f"bisect: limit={limit} is no number above 0; give what counts as a difference, or leave it out")
    base, compressed = resolve_folder(base).path, resolve_folder(compressed).path
    pair = load_pair(base, compressed, device=device)
    batches = _batches(pair, dataset, num_samples, max_seq_length)
    compare = Comparer(pair, batches, measure, progress or SilentProgress())
    layers = group_into_layers(compare.run_base())
    _check_rest(pair, compare, (Path(base), Path(compressed)))
    found = search(list(layers), compare.of_layers(layers), limit_from(limit, measure))
    sqnr = weight_sqnr(pair, pair.parts) if found.differs else {}
    guilty = tuple(_look_into(culprit, layers[culprit.name], compare, Path(compressed), sqnr) for culprit in found.culprits)
    test = _test(guilty[0], layers, compare, found.limit, (Path(base), Path(compressed))) if guilty else None
    further = suspects(sqnr, [blame.module for layer in guilty for blame in layer.modules])
    num_sequences = sum(len(tokens.input_ids) for tokens in batches)
    return BisectReport(
        str(base), str(compressed), measure, len(pair.parts), len(layers), num_sequences, found, guilty, compare.num_passes, further, test
    )


def _check_rest(pair: Pair, compare: Comparer, folders: tuple[Path, Path]) -> None:
    """Refuse two models that differ outside of their modules, which no search among modules can find."""
    outside = abs(compare.outside())
    if outside <= _CHANCE + abs(compare(frozenset(pair.parts))) / 10:
        return
    ours, theirs = (read_config(folder) for folder in folders)
    keys = sorted(key for key in (ours.keys() | theirs.keys()) - _OWN_KEYS if ours.get(key) != theirs.get(key))
    told = f"config.json differs in {some(keys)}" if keys else "what differs is in no module"
    raise ModelError(
        f"{folders[1]}: by itself it is {shown(outside, compare.measure)} ({compare.measure}) from the base with all its modules in place, "
        f"so that no module can be blamed; {told}: make that equal, then search again"
    )


def _batches(pair: Pair, dataset: Any, num_samples: int, max_seq_length: int) -> list[TokenBatch]:
    positions = getattr(getattr(pair.base, "config", None), "max_position_embeddings", None)
    data = load_dataset_source(
        dataset,
        tokenizer=pair.tokenizer,
        num_calibration_samples=num_samples,
        max_seq_length=min(max_seq_length, positions or max_seq_length),
    )
    check_batches(data, pair.base)
    batches = token_batches(data)
    if not any(bool(tokens.scored.any()) for tokens in batches):
        cut = "" if max_seq_length > 1 else f" of max_seq_length={max_seq_length}"
        what = "two tokens of which a later one counts, and nothing can be predicted without"
        raise DatasetError(f"dataset: no sequence{cut} has {what}; give longer ones")
    return batches


def _look_into(culprit: Culprit, parts: Sequence[str], compare: Comparer, folder: Path, sqnr: Mapping[str, float]) -> GuiltyLayer:
    """Search the modules of a guilty layer; most of the layer's own difference is what makes a module guilty."""
    inside = search(parts, compare)
    return GuiltyLayer(culprit, tuple(_blame(one, compare, folder, sqnr) for one in inside.culprits), inside.alone)


def _blame(one: Culprit, compare: Comparer, folder: Path, sqnr: Mapping[str, float]) -> Blame:
    part = guilty_part(compare.pair, one.name, one.alone, compare)
    of_states = kv_format(compare.pair.compressed.get_submodule(one.name)) if part is not None else None
    made = who_made(one.name, folder, of_states)
    return Blame(
        one.name, one.alone, one.rest, **made, weight_sqnr_db=sqnr.get(one.name), usual_sqnr_db=usual_sqnr(one.name, sqnr), part=part
    )


def _test(layer: GuiltyLayer, layers: dict[str, tuple[str, ...]], compare: Comparer, limit: float, folders: tuple[Path, Path]) -> str:
    """Write the test of the first guilty module, or of the whole layer, on the sequence that shows it best."""
    subject = layer.modules[0].module if layer.modules else layer.culprit.name
    names = frozenset([subject]) if layer.modules else frozenset(layers[subject])
    alone = compare(names)
    by_sequence = compare.by_sequence[names]
    worst = max(range(len(by_sequence)), key=lambda place: by_sequence[place])
    rows = [row[real].tolist() for tokens in compare.batches for row, real in zip(tokens.input_ids, tokens.real, strict=True)]
    most = limit if limit < alone else half_of(alone)
    return write_test(*folders, [subject], rows[worst], measure=compare.measure, limit=most)
