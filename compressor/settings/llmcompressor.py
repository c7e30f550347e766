"""What the keywords of llm-compressor 0.14 mean here, where they have another name, another form or no meaning.

Keywords that have the name and the meaning that they have there are fields of `OneshotSettings` and do not stand here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from compressor.errors import UserInputError

_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
_PIPELINES = {"datafree": "data_free", "independent": None}
_BUILDERS = ("csv", "json", "custom", "text", "parquet")
"""Names that say of what kind `dataset_path` is, which its ending says here."""

_HOMES = """
    args args.dataset_arguments args.model_arguments args.recipe_arguments
    core core.events core.events.event core.lifecycle core.session core.session_functions core.state
    datasets datasets.utils
    entrypoints.model_free entrypoints.utils
    logger
    modeling modeling.moe modeling.moe.context modeling.moe.linearize modeling.prepare
    modifiers.awq modifiers.awq.mappings
    modifiers.interface modifiers.modifier
    modifiers.logarithmic_equalization modifiers.logarithmic_equalization.base
    modifiers.obcq modifiers.obcq.sgpt_base
    modifiers.pruning.constant modifiers.pruning.constant.base
    modifiers.quantization.gptq modifiers.quantization.quantization modifiers.quantization.quantization.base
    modifiers.smoothquant modifiers.smoothquant.base modifiers.smoothquant.utils
    modifiers.transform
    modifiers.transform.awq modifiers.transform.awq.base modifiers.transform.awq.mappings
    modifiers.transform.quip modifiers.transform.quip.base
    modifiers.transform.smoothquant modifiers.transform.smoothquant.base
    modifiers.transform.spinquant modifiers.transform.spinquant.base
    modifiers.transform.spinquant.mappings modifiers.transform.spinquant.norm_mappings
    transformers transformers.compression transformers.compression.compressed_tensors_utils
    transformers.data transformers.data.base
    utils utils.dev utils.transformers
"""
MODULES = frozenset(f"compressor.{name}" for name in _HOMES.split())
"""Modules from which scripts import there, and which do not exist here: each gives all public names, and says of NAMES what to do."""


@dataclass(frozen=True)
class Keyword:
    """A keyword of llm-compressor.

    Attributes:
        name: there.
        says: what is meant here; the end of an error or a warning.
        same: values that ask for what happens here anyway.
        becomes: own arguments in place of another value; None where there are none.
        refused: another value without own arguments is an error; else a warning says that nothing comes of it.
    """

    name: str
    says: str
    same: tuple[Any, ...] = ()
    becomes: Callable[[Any], dict[str, Any]] | None = None
    refused: bool = False


def _renamed(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: value}


def _split(splits: Any) -> dict[str, Any]:
    """One split, of a text, a list of one, or a mapping that names the one for calibration."""
    if isinstance(splits, Mapping):
        chosen = splits.get("calibration", splits.get("train") if len(splits) == 1 else None)
    else:
        chosen = splits[0] if isinstance(splits, list | tuple) and len(splits) == 1 else splits
    if not isinstance(chosen, str):
        raise UserInputError(f"splits: {splits!r} names no split for calibration, or several; give one, such as split='train[:512]'")
    return {"split": chosen}


def _collator(value: Any) -> dict[str, Any]:
    if not callable(value):
        raise UserInputError(f"data_collator: {value!r} is no function and not 'padding' or 'truncation'; give a function, or leave it out")
    return {"data_collator": value}


def _as_list(value: Any) -> dict[str, Any]:
    return {"remove_columns": [value] if isinstance(value, str) else value}


KEYWORDS: tuple[Keyword, ...] = (
    Keyword("precision", "it is `dtype`", (None,), lambda value: {"dtype": _DTYPES.get(value, value) if isinstance(value, str) else value}),
    Keyword(
        "save_compressed",
        "the checkpoint is always stored compressed, as transformers and vLLM load it; leave it out",
        (True, None),
        refused=True,
    ),
    Keyword("clear_sparse_session", "there is no session outside of a run", (True, False, None)),
    Keyword("quantization_aware_calibration", "it has no effect there either", (True, None)),
    Keyword("splits", "it is `split`", (None,), _split),
    Keyword("remove_columns", "a text or a list of texts", (None,), _as_list),
    Keyword(
        "num_calibration_samples", "None takes all", (), lambda value: {"num_calibration_samples": sys.maxsize if value is None else value}
    ),
    Keyword("batch_size", "None chooses by length", (), _renamed("batch_size")),
    Keyword("data_collator", "rows of different lengths are padded, and padding counts in no statistic", ("padding", None), _collator),
    Keyword("pad_to_max_length", "padding counts in no statistic, so none is added", (False, None)),
    Keyword("overwrite_cache", "no processed data is kept between runs", (False, None)),
    Keyword("preprocessing_num_workers", "rows are read in this process", (None, 0, 1)),
    Keyword("dataloader_num_workers", "rows are read in this process", (None, 0, 1)),
    Keyword("dvc_data_repository", "give the file itself as dataset=", (None,), refused=True),
    Keyword("moe_calibrate_all_experts", "it is `calibrate_all_experts`", (None,), _renamed("calibrate_all_experts")),
    Keyword(
        "pipeline",
        "`datafree` is `data_free`; `independent` is None: what the modifiers need",
        (None,),
        lambda value: {"pipeline": _PIPELINES.get(value, value) if isinstance(value, str) else value},
    ),
    Keyword("tracing_ignore", "the tracer finds out by itself what it must not enter, and proves what it recorded", (None,)),
    Keyword("sequential_targets_per_subgraph", "each target is a stage of its own", (1, None)),
    Keyword(
        "sequential_offload_device",
        "weights wait in main memory (`cpu`), or nowhere (`none`)",
        (None,),
        lambda value: {"sequential_offload_device": getattr(value, "type", value)},  # a torch.device, too
    ),
    Keyword("sequential_prefetch", "the activations of the next sample are always fetched ahead", (False, None)),
    Keyword("oneshot_device", "it is `device`", (None,), _renamed("device")),
    Keyword("log_dir", "the record of a run is compression.json beside the weights", (None,)),
    Keyword("overwrite_output_dir", "a folder that holds a model is never overwritten; remove it first", (False, None), refused=True),
    Keyword("callbacks", "write a modifier, whose callbacks are called; see the chapter on modifiers", (None,), refused=True),
)

_TABLE = {keyword.name: keyword for keyword in KEYWORDS}

_SESSION = "a run has a session of its own, which is closed with it; what a modifier needs is in `state`"
_EXPERTS = "load the model with from_pretrained, or give oneshot its folder: experts that are stored as one are taken apart for the run"
_FIELDS = "give its fields to oneshot() as keywords"
_DATA = "give oneshot() the dataset itself; among several processes it divides that"
_LOGGING = "import logging, and take logging.getLogger('compressor')"
_AS_TABLE = "write it as a mapping with the same keys: {}"

NAMES = {
    "Oneshot": "call oneshot(), which holds nothing between two calls",
    "create_session": _SESSION,
    "active_session": _SESSION,
    "reset_session": f"{_SESSION}, so that there is nothing to reset",
    "callbacks": "write a modifier (`Modifier`), whose callbacks are called",
    "pre_process": "call oneshot(), which does it",
    "post_process": "call oneshot(), which does it",
    "dispatch_for_generation": "leave the call out: `result.model` generates at once",
    "load_context": _EXPERTS,
    "load_quantizable_moe": _EXPERTS,
    "linearize_moe": _EXPERTS,
    "moe_calibration_context": _EXPERTS,
    "replace_modules_for_calibration": _EXPERTS,
    "skip_weights_download": "`compressor plan` and `compressor trace` need no weights",
    "untie_word_embeddings": "give oneshot() tie_word_embeddings=False",
    "DatasetArguments": _FIELDS,
    "ModelArguments": _FIELDS,
    "RecipeArguments": _FIELDS,
    "configure_logger": _LOGGING,
    "logger": _LOGGING,
    "LoggerConfig": _LOGGING,
    "modify_save_pretrained": "leave the call out: `save_pretrained` of `result.model` writes it compressed",
    "TextGenerationDataset": "give oneshot() a dataset with preprocessing_func=",
    "get_calibration_dataloader": _DATA,
    "get_processed_dataset": _DATA,
    "get_rank_partition": _DATA,
    "SparseAutoModelForCausalLM": "take AutoModelForCausalLM of transformers, which loads what is written here",
    "AWQMapping": _AS_TABLE.format('{"smooth_layer": ..., "balance_layers": [...]}'),
    "SpinQuantMapping": _AS_TABLE.format('{"embedding": ..., "attn_o": ..., ...}'),
    "NormMapping": _AS_TABLE.format('{"norm": ..., "linears": [...]}'),
}
"""Names that a script may import from llm-compressor, and what to do here."""


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Say in our words what somebody says in those of llm-compressor; warn of what has no effect.

    Args:
        given: keyword arguments of `oneshot`.

    Returns:
        Our keyword arguments.

    Raises:
        UserInputError: what a keyword asks for is not done here, or it was given beside its name of here.
    """
    own: dict[str, Any] = {}
    for name, value in _with_path(given).items():
        keyword = _TABLE.get(name)
        made = {name: value} if keyword is None else _meant(keyword, value)
        for other in made:
            if other in own or (other != name and other in given):
                raise UserInputError(f"{name}: it was given beside {other}, which means the same; leave one out")
        own |= made
    return own


def _with_path(given: Mapping[str, Any]) -> dict[str, Any]:
    """`dataset_path`, whose kind `dataset` may name, in place of both."""
    rest = dict(given)
    path = rest.pop("dataset_path", None)
    if path is None:
        return rest
    if rest.get("dataset") is not None and rest["dataset"] not in _BUILDERS:
        raise UserInputError(f"dataset_path: {path!r} was given beside dataset; leave one out")
    return {**rest, "dataset": path}


def _meant(keyword: Keyword, value: Any) -> dict[str, Any]:
    if any(value is one or (type(value) is type(one) and value == one) for one in keyword.same):
        return {}
    is_truncation = keyword.name == "data_collator" and value == "truncation"
    if keyword.becomes is not None and not is_truncation:
        return keyword.becomes(value)
    if keyword.refused:
        raise UserInputError(f"{keyword.name}: {value!r} cannot be had here: {keyword.says}")
    text = repr(value)
    warnings.warn(f"{keyword.name}={text if len(text) <= 60 else '...'} has no effect here: {keyword.says}", UserWarning, stacklevel=5)
    return {}
