"""The main path of `harness validate`: read both folders, check them from the file to the behaviour, and hand back a report.

Cheap checks come first. A later check that cannot run without an earlier one is skipped with that reason, never left away.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from compressor import __version__
from compressor.data import CalibrationData, load_dataset_source, open_source
from compressor.distributed.ranks import Ranks, joined
from compressor.errors import DatasetError, ModelError, UserInputError
from compressor.model.evaluation import check_dtypes_around
from compressor.model.folder import resolve_folder, weight_files
from compressor.model.loading.load import LoadedModel, load_model, resolve_device
from compressor.numerics.precision import widened_products
from compressor.progress import Progress, SilentProgress
from compressor.settings.kinds import WHOLE, plain_number
from compressor.settings.options import check_kind
from compressor.settings.verbs import DataSettings
from compressor.spelling import suggest
from harness.reporting.record import CheckRecord, decide
from harness.reporting.verdict import EXIT_CODES, Outcome, Verdict
from harness.validation.behaviour.acceptance import check_accepted, check_loads
from harness.validation.behaviour.quality import ACCURACY, FINITE, KL, PERPLEXITY, TOP1, Quality, check_quality
from harness.validation.behaviour.scoring import Scores, TokenBatch, model_logits, score_models, sees_ahead, token_batches
from harness.validation.behaviour.transformed import check_transforms
from harness.validation.format.files import check_files
from harness.validation.format.record import check_digests, check_quantization_config, check_record, file_hashes, read_record
from harness.validation.format.sparsity import check_sparsity
from harness.validation.inspection import ModuleInspection, inspect_modules
from harness.validation.policy import Policy, policy_of
from harness.validation.serving.checks import check_serving
from harness.validation.serving.servers import SERVERS, ServerName
from harness.validation.subject import Subject, read_subject
from harness.validation.weights import check_weights

LOGITS_AT_ONCE = 1 << 25
"""Elements of one batch of logits; both models' are in memory together."""

_TAKES = "validate compares predictions of the next token, so give a causal language model"

PACKAGES = ("compressed-tensors", "numpy", "safetensors", "torch", "transformers")


@dataclass(frozen=True)
class ValidationReport:
    """Everything a validation found.

    Attributes:
        verdict: what the records together mean.
        records: one per check, in the order in which they ran.
        policy: the limits that were applied.
        modules: every quantized module.
        quality: measurements on the held-out data; None where they could not be made.
        scores: both models token by token, for the plots; None likewise.
        provenance: what was compared, with what; the same for the same inputs and versions.
        run: when and where, and how long it took; differs from run to run.
    """

    verdict: Verdict
    records: tuple[CheckRecord, ...]
    policy: Policy
    modules: tuple[ModuleInspection, ...]
    quality: Quality | None
    scores: Scores | None
    provenance: dict[str, Any]
    run: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """The exit code of the command line for this verdict."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types; only `run` differs between runs on the same inputs."""
        return {
            "schema_version": 1,
            "verdict": self.verdict.value,
            "checks": [record.to_dict() for record in self.records],
            "modules": [_module_dict(module) for module in self.modules],
            "metrics": self.quality.to_dict() if self.quality else None,
            "policy": self.policy.model_dump(),
            "provenance": self.provenance,
            "run": self.run,
        }


def _module_dict(module: ModuleInspection) -> dict[str, Any]:
    close = module.closeness
    measured = {"sqnr_db": close.sqnr_db, "gain": close.gain, "scale_mismatch": close.mismatch} if close else {}
    return {"name": module.name, "scheme": module.label, "weights": module.num_weights, "clipped_frac": module.clipped_frac, **measured}


@widened_products()
def validate(
    base: str | Path,
    compressed: str | Path,
    dataset: Any,
    *,
    split: str | None = None,
    policy: Policy | str | Path | None = None,
    trained: bool = False,
    trust_remote_code_model: bool = False,
    serve: ServerName | Literal["none"] = "vllm",
    device: str = "auto",
    max_seq_length: int | None = None,
    num_samples: int = 512,
    seed: int = 0,
    progress: Progress | None = None,
) -> ValidationReport:
    """Check a compressed causal language model against its base, from the bytes of the files to the behaviour on held-out data.

    Under an initialized process group all ranks call it alike: they share the predictions, and each gets the report.

    Args:
        base: folder of the base model, or its name on the hub (`owner/name`, `owner/name@revision`).
        compressed: folder of the compressed checkpoint, compressed-tensors format, or its name on the hub.
        dataset: held-out data, any source that `compressor.data.open_source` reads: files, names on the hub, `wikitext` and the like.
        split: of a dataset that has several, or a part of one, such as `test[:100]`.
        policy: limits, or the path of their file; None for the defaults.
        trained: the model was trained as well (QAT, pruning): values are not compared with the base's, behaviour is.
        trust_remote_code_model: run Python files of both folders, where their configs ask for them.
        serve: the server whose loader the files are held against, without the server itself: vllm, sglang, none.
        device: where both models run: auto, cpu, cuda.
        max_seq_length: tokens of a sequence; None for what the model takes, at most 2048.
        num_samples: sequences at most.
        seed: of the bootstrap.
        progress: shows bars.
    Returns:
        The report; a bad checkpoint gives a verdict, not an exception.
    Raises:
        UserInputError: the seed is negative, a setting of the wrong kind, no such server, an unusable policy, or torch.autocast is on.
        ModelError: a folder is missing, or the base cannot be used, because it is no causal language model for one.
        DatasetError: the data cannot be used.
    """
    check_dtypes_around(validate)
    num_samples, max_seq_length, seed = map(plain_number, (num_samples, max_seq_length, seed))
    _refuse(num_samples, max_seq_length, seed, serve)
    policy = policy_of(policy)
    started, clock = datetime.now(UTC), time.monotonic()
    progress = progress or SilentProgress()
    torch_device = resolve_device(device)
    with joined() as ranks:
        folders = [resolve_folder(source, code=trust_remote_code_model).path for source in (base, compressed)]
        subject = read_subject(*folders, trained=trained, trust_remote_code=trust_remote_code_model)
        base_model = _base_model(subject)
        data = _load_data(subject, dataset, split, base_model.tokenizer, max_seq_length, num_samples)
        batches = _token_batches(data, base_model.model)
        if sees_ahead(model_logits(base_model.model, torch_device), batches):
            raise ModelError(f"{base}: what its predictions say of a token depends on later tokens; {_TAKES}")
        base_hashes = file_hashes(subject.base.folder)
        server = None if serve == "none" else serve
        records, modules, loaded = _records_of_files(subject, base_hashes, data, policy, server, progress)
        quality, scores = None, None
        why = "the checkpoint does not load" if loaded is None else _other_vocabulary(base_model.model, loaded)
        if loaded is None or why:
            records += [claim.skipped(why) for claim in (FINITE, PERPLEXITY, KL, TOP1, ACCURACY)]
        else:
            scores = _score(base_model.model, loaded, batches, torch_device, ranks, progress)
            found, quality = check_quality(scores, policy, seed, data.unread_masks)
            records += found
        if subject.moved or subject.unreadable:
            records.append(check_transforms(subject, base_model.model, batches[0]))
        provenance = {
            **_provenance(subject, base_hashes, dataset, data, seed),
            "trained": trained,
            "served by": SERVERS[server].title if server else None,
        }
        run = {"started": started.isoformat(timespec="seconds"), "seconds": round(time.monotonic() - clock, 2), **_machine(torch_device)}
        return ValidationReport(decide(records), tuple(records), policy, tuple(modules), quality, scores, provenance, run)


def _refuse(num_samples: Any, max_seq_length: Any, seed: Any, serve: Any) -> None:
    numbers = {"num_samples": num_samples, "seed": seed, "max_seq_length": 1 if max_seq_length is None else max_seq_length}
    for name, value in numbers.items():
        check_kind(name, value, WHOLE)
    if serve not in (*SERVERS, "none"):
        raise UserInputError(f"serve: {serve!r} is no server that is known here; {suggest(str(serve), [*SERVERS, 'none'])}")
    if seed < 0:
        raise UserInputError(f"seed: {seed} was given, where a whole number of 0 or more belongs; correct it")


def _records_of_files(
    subject: Subject, base_hashes: Mapping[str, str], data: CalibrationData, policy: Policy, server: ServerName | None, progress: Progress
) -> tuple[list[CheckRecord], list[ModuleInspection], torch.nn.Module | None]:
    """Check what lies in the folders; return the records, what was found module by module, and the loaded checkpoint."""
    folder, digests = subject.compressed.folder, check_digests(subject.compressed.stored)
    records = [*check_files(subject), *check_record(folder, base_hashes, weight_files(subject.base.folder), data), digests]
    records += [check_quantization_config(folder, subject.config), check_accepted(subject)]
    records += check_serving(subject, server, policy)
    loads, loaded = check_loads(subject, allow_dequantize_load=policy.allow_dequantize_load)
    modules = inspect_modules(subject, loaded, progress=progress)
    records += [loads, *check_weights(subject, modules, policy, is_as_written=digests.outcome is Outcome.PASS), check_sparsity(subject)]
    return records, modules, loaded


def _base_model(subject: Subject) -> LoadedModel:
    """Load the base; of a class that predicts no next token say so, in place of advice that has no place here."""
    folder, named = subject.base.folder, subject.base_config.get("architectures")
    if isinstance(named, list) and named and str(named[0]).endswith("ForMaskedLM"):  # transformers would load it as a causal one
        raise ModelError(f"{folder}: config.json says {named[0]}, which fills masks; {_TAKES}")
    try:
        return load_model(folder, device="cpu", trust_remote_code=subject.trust_remote_code)
    except ModelError as error:
        if isinstance(named, list) and named and not str(named[0]).endswith(("ForCausalLM", "LMHeadModel")):
            raise ModelError(f"{folder}: config.json says {named[0]}, and as a causal language model it does not load; {_TAKES}") from error
        raise


def _load_data(
    subject: Subject, dataset: Any, split: str | None, tokenizer: Any, max_seq_length: int | None, num_samples: int
) -> CalibrationData:
    length, vocab_size = subject.base_config.get("max_position_embeddings"), subject.base_config.get("vocab_size")
    scored_length = max_seq_length or min(2048, length or 2048)
    return load_dataset_source(
        open_source(dataset, DataSettings(split=split), batch_size=None, shuffle_seed=None, tokenizer=tokenizer),
        tokenizer=tokenizer,
        num_calibration_samples=num_samples,
        max_seq_length=max_seq_length,
        batch_size=max(1, min(32, LOGITS_AT_ONCE // (scored_length * (vocab_size or 32_000)))),
        max_positions=length,
    )


def _token_batches(data: CalibrationData, model: torch.nn.Module) -> list[TokenBatch]:
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    batches = token_batches(data)
    largest = max(int(batch.input_ids.max()) for batch in batches)
    if largest >= embeddings.num_embeddings:
        raise DatasetError(f"dataset: token id {largest} is outside the model's vocabulary of {embeddings.num_embeddings}; "
                           "give data of this model's tokenizer")  # fmt: skip
    return batches


def _other_vocabulary(base: torch.nn.Module, compressed: torch.nn.Module) -> str:
    """Say that predictions cannot be compared; files.config and files.tensors have found it by then."""
    sizes = [getattr(model.config, "vocab_size", None) for model in (base, compressed)]
    return "" if sizes[0] == sizes[1] else f"the base predicts {sizes[0]} tokens, the checkpoint {sizes[1]}"


def _score(
    base: torch.nn.Module,
    compressed: torch.nn.Module,
    batches: Sequence[TokenBatch],
    device: torch.device,
    ranks: Ranks,
    progress: Progress,
) -> Scores:
    scores = score_models(model_logits(base, device), model_logits(compressed, device), batches, ranks=ranks, progress=progress)
    if not bool(np.isfinite(scores.tokens.nll_base).all()):
        raise ModelError("the base model's predictions are not finite on this data; nothing can be compared with it")
    return scores


def _provenance(subject: Subject, base_hashes: dict[str, str], dataset: Any, data: CalibrationData, seed: int) -> dict[str, Any]:
    folder = subject.compressed.folder
    return {
        "base": {"path": str(subject.base.folder), "tensor_bytes": subject.base.num_bytes, "sha256": base_hashes},
        "compressed": {"path": str(folder), "tensor_bytes": subject.compressed.num_bytes, "sha256": file_hashes(folder)},
        "dataset": {
            "source": str(dataset) if isinstance(dataset, str | Path) else type(dataset).__name__,
            "sha256": data.sha256,
            "num_samples": data.num_samples,
            "num_tokens": data.num_tokens,
        },
        "compression": read_record(folder),
        "seed": seed,
        "versions": {"compressor-harness": __version__, "python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
    }


def _machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"device": device.type, "machine": name, "threads": torch.get_num_threads()}
