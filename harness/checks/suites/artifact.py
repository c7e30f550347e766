"""Checks of checkpoints: 55 to 60, and what `harness validate` asks without data."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from compressor.model.checkpoints.load import load_compressed
from compressor.model.folder import weight_files
from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.protocols import Artifact
from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome
from harness.tolerance import T0, T3, compare, vacuous_decoys
from harness.validation.behaviour.acceptance import check_accepted, check_loads
from harness.validation.format.files import TOKENIZER, check_files, check_tokenizer
from harness.validation.format.record import check_digests, check_quantization_config, check_record, file_hashes
from harness.validation.format.scheme import WeightScheme
from harness.validation.format.sparsity import check_sparsity
from harness.validation.inspection import inspect_modules
from harness.validation.policy import Policy
from harness.validation.subject import Subject, read_subject
from harness.validation.weights import DECODED, check_weights

# Last names of layers that runtimes cut along their columns.
_CUT_ALONG_COLUMNS = ("o_proj", "down_proj", "out_proj", "fc2", "w2")
_LOSS_RATIO = 1.005


def _hold(record: CheckRecord) -> str:
    """Turn a record of `harness validate` into the answer of a check."""
    if record.outcome is Outcome.SKIP:
        raise NothingToCheckError(record.summary)
    if record.outcome is not Outcome.PASS:
        raise CheckFailed(record.summary, record.findings)
    return record.summary


def _subject(artifact: Artifact) -> Subject:
    subject = read_subject(Path(artifact.base), Path(artifact.folder), trained="trained" in artifact.tags)
    if subject.problems:
        raise CheckFailed(subject.problems[0], subject.problems)
    return subject


def _tokens(model: nn.Module, seed: int) -> Tensor:
    table: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]
    return torch.randint(0, table.num_embeddings, (2, 12), generator=torch.Generator().manual_seed(seed))


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    device = next(iter(model.state_dict().values())).device
    with torch.inference_mode():
        found: Tensor = model(input_ids=ids.to(device), use_cache=False).logits
    return found.cpu()


@register(
    55,
    "reload",
    "Reloading gives the same state and the same logits, bitwise, with either loader; no key is missing and none unexpected",
    kind="artifact",
    caught_by=("transformers#47407",),
)
def reload(subject: Artifact, context: CheckContext) -> str:
    """Load with transformers and with our reader, and hold both against each other and against what was saved."""
    record, loaded = check_loads(_subject(subject), allow_dequantize_load=False)
    summary = _hold(record)
    own = load_compressed(subject.folder, device="cpu")
    ids = _tokens(own, context.seed)
    expected = _logits(own, ids)
    assert loaded is not None
    _equal(_logits(loaded, ids), expected, "transformers' logits differ from those of our reader")
    if subject.model is None:
        return f"{summary}; equal logits"
    _equal(_logits(subject.model, ids), expected, "the logits of the model that was saved are others")
    state, saved = own.state_dict(), subject.model.state_dict()
    for key in sorted(state.keys() & saved.keys()):
        _equal(saved[key], state[key], f"{key} has changed on the way through the file")
    return f"{summary}; {len(state.keys() & saved.keys())} tensors and the logits are equal"


def _equal(actual: Tensor, expected: Tensor, what: str) -> None:
    found = compare(actual, expected, T0())
    if not found.ok:
        raise CheckFailed(f"{what}: {found.summary}")


@register(56, "accepted", "quantization_config is accepted by transformers' own loader and by compressed-tensors", kind="artifact")
def accepted(subject: Artifact, context: CheckContext) -> str:
    """Ask both."""
    del context
    return _hold(check_accepted(_subject(subject)))


@register(57, "decoded", "An independent decoder of the file gives the weights that are loaded, bitwise", kind="artifact")
def decoded(subject: Artifact, context: CheckContext) -> str:
    """Decode each module with numpy, and compare with what transformers and our reader hold."""
    del context
    folders = _subject(subject)
    summaries = []
    for model in (check_loads(folders, allow_dequantize_load=True)[1], load_compressed(subject.folder, device="cpu")):
        if model is None:
            raise CheckFailed("the checkpoint does not load; check 55 says why")
        records = check_weights(folders, inspect_modules(folders, model), Policy())
        summaries.append(_hold(next(record for record in records if record.name == DECODED.name)))
    return summaries[0]


@register(
    58,
    "shards",
    "Shard and tensor-parallel dimensions divide into groups, or the run says which do not",
    kind="artifact",
    caught_by=("vllm#41511",),
)
def shards(subject: Artifact, context: CheckContext) -> str:
    """Divide the shapes of the base's weights by groups and blocks."""
    del context
    if subject.num_shards < 1:
        raise CheckFailed(f"num_shards is {subject.num_shards}, where 1 or more belongs")
    if subject.num_shards == 1:
        raise NothingToCheckError("the checkpoint is meant for one device")
    folders, said = _subject(subject), subject.uncuttable()
    if unknown := sorted(name for name in said if f"{name}.weight" not in folders.base.entries):
        raise CheckFailed(f"the run names {unknown[0]!r} as what cannot be cut, and the base has no such module", unknown)
    found = {}
    for name, group in folders.readable_modules.items():
        assert group.scheme is not None
        shape = tuple(folders.base.entries[f"{name}.weight"].shape)
        axis = int(name.rpartition(".")[2] in _CUT_ALONG_COLUMNS)
        step = cut_step(group.scheme, axis)
        if shape[axis] % (subject.num_shards * step):
            found[name] = f"{shape[axis]} {('rows', 'columns')[axis]} in pieces of {step} for {subject.num_shards} devices"
    silent = [f"{name}: {why}" for name, why in found.items() if name not in said]
    if silent:
        raise CheckFailed(f"{len(silent)} modules cannot be cut, and the run does not say so; first: {silent[0]}", silent)
    return f"{len(folders.readable_modules)} modules for {subject.num_shards} devices, {len(found)} cannot be cut and are named"


def cut_step(scheme: WeightScheme, axis: int) -> int:
    """How many rows (axis 0) or columns (axis 1) hang together: a block, a group, and what shares a 32-bit word."""
    step = scheme.block[axis] if scheme.block is not None else 1
    if axis and scheme.has_groups:
        step = math.lcm(step, scheme.group_size or 1)
    shares_words = axis == 1 or (not scheme.symmetric and scheme.strategy != "tensor")
    if scheme.is_packed and shares_words:
        step = math.lcm(step, math.lcm(scheme.num_bits, 32) // scheme.num_bits)
    return step


@register(59, "tokenizer", "The saved tokenizer files equal the source's", kind="artifact", caught_by=("llm-compressor#2850",))
def tokenizer(subject: Artifact, context: CheckContext) -> str:
    """Compare bytes."""
    del context
    return _hold(check_tokenizer(Path(subject.base), Path(subject.folder)))


def _weights(folders: Subject, digests: CheckRecord) -> list[CheckRecord]:
    return check_weights(folders, inspect_modules(folders, None), Policy(), is_as_written=digests.outcome is Outcome.PASS)


@register(None, "against_base", "Files, record and weights are what `harness validate` lets through without data", kind="artifact")
def against_base(subject: Artifact, context: CheckContext) -> str:
    """Run its checks of bytes and values; those that cannot tell (rows that are too short) are named, and count where a record should."""
    del context
    folders = _subject(subject)
    base = folders.base.folder
    records = [*check_files(folders), *check_record(folders.compressed.folder, file_hashes(base), weight_files(base), None)]
    digests = check_digests(folders.compressed)
    records += [digests, check_quantization_config(folders.compressed.folder, folders.config)]
    records += [*_weights(folders, digests), check_sparsity(folders)]
    asked = [record for record in records if record.name not in (TOKENIZER.name, DECODED.name)]  # which have checks of their own
    owed = [record for record in asked if record.outcome is Outcome.INCONCLUSIVE and record.name.startswith("record.")]
    if failed := [*(record for record in asked if record.outcome is Outcome.FAIL), *owed]:
        raise CheckFailed(f"{failed[0].name}: {failed[0].summary}", [line for record in failed for line in record.findings])
    told = [f"; {record.name} cannot tell: {record.summary}" for record in asked if record.outcome is Outcome.INCONCLUSIVE]
    return f"{sum(record.outcome is Outcome.PASS for record in asked)} checks of harness validate{''.join(told)}"


@register(60, "devices", "CPU against CUDA: equal codes and scales, loss within 0.5 %", kind="artifact")
def devices(subject: Artifact, context: CheckContext) -> str:
    """Load on both and compare; needs a GPU."""
    if not torch.cuda.is_available():
        raise NothingToCheckError("torch sees no CUDA device")
    here, there = (load_compressed(subject.folder, device=device) for device in ("cpu", "cuda"))
    for key, value in here.state_dict().items():
        _equal(there.state_dict()[key].cpu(), value, f"{key} differs on CUDA")
    ids = _tokens(here, context.seed)
    return same_loss(_losses(there, ids), _losses(here, ids))


def _losses(model: nn.Module, ids: Tensor) -> Tensor:
    logits = _logits(model, ids)[:, :-1].double()
    return -logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def same_loss(actual: Tensor, expected: Tensor) -> str:
    """Hold the mean loss of one device against the other's."""
    tier = T3(max_loss_ratio=_LOSS_RATIO)
    if passed := vacuous_decoys(expected, tier):
        raise CheckFailed(f"the limit measures nothing: {', '.join(passed)} would pass")
    found = compare(actual, expected, tier, name="loss")
    if not found.ok or not math.isfinite(float(actual.mean())):
        raise CheckFailed(f"loss {float(actual.mean()):.6g} on CUDA, {float(expected.mean()):.6g} on the CPU: {found.summary}")
    return f"loss {float(actual.mean()):.6g} and {float(expected.mean()):.6g}"
