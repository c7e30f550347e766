"""Checks of the format: do those who will load the checkpoint accept it, and get from it what lies in the file?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from compressor.model.folder import some
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome
from harness.tolerance.bits import to_bytes
from harness.validation.format.container import Checkpoint
from harness.validation.format.online import online_groups, online_misfits
from harness.validation.format.record import written_notes
from harness.validation.loading import LOADER_ERRORS, LoadAttempt, first_line, load_compressed, load_with_our_reader
from harness.validation.subject import Subject

ACCEPTED = Claim("format.accepted", "transformers and compressed-tensors accept quantization_config")
LOADS = Claim("format.loads", "transformers loads it with no missing, unexpected or mismatched key")


def check_accepted(subject: Subject) -> CheckRecord:
    """Hand quantization_config to both parsers, without any weight.

    Args:
        subject: both folders.
    Returns:
        The record.
    """
    from compressed_tensors.quantization import QuantizationConfig
    from transformers import CompressedTensorsConfig

    config = subject.quantization_config
    if config is None and not subject.quantizes_weights:
        return ACCEPTED.skipped("there is no quantization_config: nothing is quantized")
    if config is None:
        return ACCEPTED.record(Outcome.FAIL, subject.problems[0])
    findings = list(subject.problems)
    if config.get("quant_method") != "compressed-tensors":
        findings.append(f"quant_method is {config.get('quant_method')!r}, not 'compressed-tensors'")
    try:
        fields = {key: config.get(key) for key in QuantizationConfig.model_fields if config.get(key) is not None}
        QuantizationConfig.model_validate(fields)
        parsed = CompressedTensorsConfig.from_dict(dict(config))
        if subject.quantizes_weights and not parsed.is_quantization_compressed:
            findings.append(f"quantization_status is {config.get('quantization_status')!r}: loaders take the weights for uncompressed")
    except LOADER_ERRORS as error:
        findings.append(first_line(error))
    findings += [*_contradictions(config, subject.compressed), *online_misfits(subject)]
    used = {(group.name, group.scheme.label) for group in subject.readable_modules.values() if group.scheme}
    schemes = sorted({f"{label}{_of_activations(config['config_groups'][name])}" for name, label in used})
    if isinstance(kv := config.get("kv_cache_scheme"), Mapping):
        schemes.append(f"keys and values {_in_words(kv)}")
    return ACCEPTED.found(
        findings,
        "; ".join(schemes) or "no weights, what attention takes only",
        evidence={"schemes": schemes, "version": str(config.get("version"))},
    )


def _of_activations(group: Mapping[str, Any]) -> str:
    """What a group does to inputs and outputs, of which the tensors need not tell."""
    kinds = {"inputs": group.get("input_activations"), "outputs": group.get("output_activations")}
    return "".join(f", {kind} {_in_words(found)}" for kind, found in kinds.items() if isinstance(found, Mapping))


def _in_words(arguments: Mapping[str, Any]) -> str:
    symmetry = "symmetric" if arguments.get("symmetric", True) else "asymmetric"
    size = arguments.get("group_size")
    strategy = arguments.get("strategy") or ("group" if size else "tensor")
    when = {True: "dynamic", "local": "dynamic under a stored scale"}.get(arguments.get("dynamic") or False, "static")
    return (
        f"{arguments.get('type', 'int')}{arguments.get('num_bits', 8)}, {symmetry}, per {strategy}{f' of {size}' if size else ''}, {when}"
    )


def _contradictions(config: Mapping[str, Any], compressed: Checkpoint) -> list[str]:
    """Entries that no loader reads twice, and that the groups or the tensors belie."""
    formats = {group.get("format") for group in (config.get("config_groups") or {}).values()}
    formats -= {"dense"}  # of attention, which stores no codes
    findings = []
    if len(formats) == 1 and (only := formats.pop()) and config.get("format") not in (None, "mixed-precision", only):
        findings.append(f"format is {config.get('format')!r}, and every group says {only!r}")
    sparse = (config.get("sparsity_config") or {}).get("format")
    if sparse not in (None, "dense") and not any(name.endswith((".bitmask", ".compressed")) for name in compressed.entries):
        findings.append(f"sparsity_config says {sparse!r}, and no tensor is stored so")
    return findings


def check_loads(subject: Subject, *, allow_dequantize_load: bool) -> tuple[CheckRecord, torch.nn.Module | None]:
    """Load the compressed checkpoint and compare what was not quantized with the file.

    Some versions cannot load every format as it stands, but can when asked to dequantize at once (transformers 5.23 with compressed-tensors
    0.20: packed zero points). Where activations are not quantized both ways give the same model, so the later checks can go on with it.

    Args:
        subject: both folders.
        allow_dequantize_load: whether loading only in that second way is good enough.
    Returns:
        The record, and the model where it loaded in either way.
    """
    attempt, limit = load_compressed(subject.compressed.folder, trust_remote_code=subject.trust_remote_code), "plain from_pretrained"
    plain = [name for name in subject.compressed.stored.entries if name.rpartition(".")[0] not in subject.modules]
    evidence: dict[str, Any] = {"tensors not quantized": len(plain), "loaded with dequantize=True": False}
    announced = _announced(subject, attempt)
    if attempt.model is None and not announced and not online_groups(subject) and _is_weight_only(subject):
        second = load_compressed(subject.compressed.folder, dequantize=True, trust_remote_code=subject.trust_remote_code)
        if second.model is not None and not second.problems:
            evidence["loaded with dequantize=True"] = True
            outcome = Outcome.PASS if allow_dequantize_load else Outcome.FAIL
            summary = f"loads with dequantize=True only; plain from_pretrained says {_first(attempt.problems)}"
            return LOADS.record(outcome, summary, limit=limit, evidence=evidence, findings=attempt.problems), second.model
    online = sorted(online_groups(subject))
    if online:
        own = load_with_our_reader(subject.compressed.folder, trust_remote_code=subject.trust_remote_code)
        instead = "stops" if attempt.model is None else "would compute something else"  # it stops before 5.23 where nothing is quantized
        said = f"transformers applies no transform_config ({some(online)}), and {instead}; compressor.load_compressed "
        if own.model is None:
            return LOADS.record(Outcome.FAIL, f"{said}stops: {_first(own.problems)}", evidence=evidence, findings=own.problems), None
        return LOADS.record(Outcome.INCONCLUSIVE, f"{said}applies it", evidence=evidence, findings=attempt.problems), own.model
    if announced:
        own = load_with_our_reader(subject.compressed.folder, trust_remote_code=subject.trust_remote_code)
        if own.model is not None:
            said = _first(attempt.problems or ["it says nothing of its own"])
            summary = f"transformers {announced}, as the run said beforehand; compressor.load_compressed does: {said}"
            return LOADS.record(Outcome.INCONCLUSIVE, summary, limit=limit, evidence=evidence, findings=attempt.problems), own.model
    if attempt.model is None:
        summary = f"transformers does not load it: {_first(attempt.problems)}"
        return LOADS.record(Outcome.FAIL, summary, limit=limit, evidence=evidence, findings=attempt.problems), None
    findings = [*attempt.problems, *_changed_by_loader(subject.compressed.stored, attempt.model.state_dict(), plain)]
    return LOADS.found(findings, f"whole; {len(plain)} unquantized tensors are in memory as in the file", evidence=evidence), attempt.model


def _announced(subject: Subject, attempt: LoadAttempt) -> str:
    """How transformers fares with this checkpoint, where the compressor wrote that down before it began; else empty."""
    notes = " ".join(written_notes(subject.compressed.folder))
    if "will not load these experts" in notes:  # which it may fill at random without a word
        return "does not load it"
    if attempt.model is None:
        return "does not load it" if re.search(r"transformers does not (load|run) ", notes) else ""
    scales = [problem for problem in attempt.problems if re.fullmatch(r"unexpected_keys: \S+\.input_scale", problem)]
    if scales and scales == attempt.problems and "it calls their input scales unexpected" in notes:
        return "does not load its input scales"
    return ""


def _is_weight_only(subject: Subject) -> bool:
    groups = (subject.quantization_config or {}).get("config_groups") or {}
    return bool(groups) and not any(group.get("input_activations") for group in groups.values())


def _first(problems: list[str]) -> str:
    return problems[0] if len(problems) == 1 else f"{problems[0]} and {len(problems) - 1} more"


def _changed_by_loader(compressed: Checkpoint, state: Mapping[str, torch.Tensor], names: list[str]) -> list[str]:
    findings = []
    for name in names:
        stored, loaded = compressed.tensor(name), state.get(name)
        if loaded is None:
            continue  # renamed or fused by the loader; missing keys are listed by the loader itself
        if loaded.dtype != stored.dtype or not torch.equal(to_bytes(loaded.cpu()), to_bytes(stored)):
            findings.append(f"{name}: {stored.dtype} in the file, in memory {loaded.dtype} with other bytes")
    return findings
