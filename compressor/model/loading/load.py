"""From a folder, or a model in memory, to a model that may be compressed; or one line that says why not.

A weight that the files do not hold is an error: transformers would fill it with random numbers, and a compressed random layer looks like
any other. A weight that the model has no place for is one too: it would be missing from the result. Nothing is unpickled, and code from
the folder runs only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from compressor.errors import ModelError
from compressor.model.folder import (
    check_address_space,
    check_index,
    check_no_adapter,
    check_no_revision,
    check_not_quantized,
    check_weight_files,
    folder_of_code,
    one_line,
    read_config,
    read_json,
    resolve_folder,
    some,
)
from compressor.model.hub import Origin
from compressor.model.loading.casts import check_casts, check_places, read_headers, tie_notes
from compressor.model.side_files import side_notes
from compressor.model.targets import ends_of, text_config
from compressor.nn.layer import QuantizedLayer
from compressor.spelling import nearest

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


_DEFAULT_CLASS = "AutoModelForCausalLM"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_GENERATION_FILE = "generation_config.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
# What transformers raises for a folder that it cannot read: a field of a wrong kind alone gives half of these.
LOAD_ERRORS = (
    *(OSError, ValueError, RuntimeError, ImportError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError),
    *(SafetensorError, StrictDataclassError),
)


@dataclass(frozen=True)
class LoadedModel:
    """A model that may be compressed, and where it came from.

    Attributes:
        model: the model; in eval mode and on its device when it came from a folder, untouched when it came from memory.
        tokenizer: what the folder holds; None when it holds none and for a model from memory.
        source_dir: the folder; None for a model from memory.
        from_memory: True when the caller's own object is compressed.
        unexpected_keys: weights in the files that the class does not take; only an explicitly named class may leave any.
        notes: what loading has changed, for the report.
        origin: the model on the hub whose commit the folder holds; None where the user gave the folder or the model.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    source_dir: Path | None
    from_memory: bool
    unexpected_keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    origin: Origin | None = None

    @property
    def source_record(self) -> dict[str, Any]:
        """What compression.json says of where the model came from: name, revision and commit of one of the hub; else nothing."""
        return {} if self.origin is None else {"source": asdict(self.origin)}


def load_model(
    source: str | Path | nn.Module,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    model_class: str | type | None = None,
    config_folder: str | Path | None = None,
    revision: str | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer, or take a model that is in memory as it is.

    Args:
        source: folder in the layout of transformers, its name on the hub (`owner/name`, `owner/name@revision`), or a module; of a module
            nothing is changed, so dtype and class are left out.
        dtype: "auto" (the files' own), or one of bfloat16, float16, float32, float64.
        device: "auto" (the first GPU, else the CPU) or a device of torch.
        trust_remote_code: run Python files of the folder, where its config asks for them.
        model_class: class of transformers, or its name; None for AutoModelForCausalLM, which must be what config.json names.
        config_folder: folder of another config.json to load by; None for the model's own.
        revision: branch, tag or commit on the hub; None is main.

    Returns:
        The model, its tokenizer if the folder has one, and the folder.

    Raises:
        ModelError: the folder is missing, incomplete or damaged, lacks weights that the class needs, is quantized already, or the
            model in memory is; or dtype, class or revision was given for a model in memory; or the hub does not give it.
        OutOfMemoryError: the limits of the process leave no room to map the folder's files.
    """
    if isinstance(source, nn.Module):
        check_in_memory(source, dtype=dtype, model_class=model_class, revision=revision)
        if config_folder is not None:
            raise ModelError(f"config_name: {str(config_folder)!r} was given for a model in memory, which has its config; leave it out")
        _refuse_lazy(source)
        code = folder_of_code(None, source, None)
        notes = () if code is None else side_notes(code)
        return LoadedModel(source, tokenizer=None, source_dir=None, from_memory=True, notes=notes)
    torch_device, torch_dtype = resolve_device(device), resolve_dtype(dtype)
    found = resolve_folder(source, revision, code=trust_remote_code)
    folder = found.path
    config = read_config(folder if config_folder is None else Path(config_folder))
    check_not_quantized(config, str(folder))
    check_address_space(folder)
    check_no_adapter(folder)
    check_weight_files(folder)
    check_index(folder)
    read_generation_config(folder)
    loader = resolve_class(model_class)
    with quiet_transformers():
        model, info = _load_weights(folder, loader, torch_dtype, trust_remote_code, config_folder)
        check_loading_info(folder, info, config, may_leave_weights=model_class is not None)
        if model_class is None:
            check_class(folder, model, config)
        tokenizer = load_tokenizer(folder, trust_remote_code)
        check_places(model, folder, headers := read_headers(folder))
        notes = (*check_casts(model, folder, headers, is_asked=torch_dtype != "auto"), *tie_notes(model))
        code = folder_of_code(folder, model, tokenizer)
        notes += () if code is None else side_notes(code)
    unexpected = tuple(sorted(info["unexpected_keys"]))
    return LoadedModel(model.to(torch_device), tokenizer, folder, False, unexpected, notes, found.origin)


def check_float16(model: nn.Module, where: str) -> None:
    """Refuse weights that float16 has no room for, of which a cast has made infinity.

    Args:
        model: after the cast.
        where: for the error.

    Raises:
        ModelError: a parameter in float16 holds infinity.
    """
    cast = ((name, parameter) for name, parameter in model.named_parameters() if parameter.dtype == torch.float16)
    spoilt = [name for name, parameter in cast if parameter.numel() and bool(parameter.isinf().any())]
    if spoilt:
        raise ModelError(f"{where}: float16 ends at 65,504, and {some(spoilt)} hold more; take bfloat16 or float32")


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Turn the name of a device into a device that is there.

    Args:
        device: "auto" (the first GPU, else the CPU), or a device as torch spells it.

    Returns:
        The device.

    Raises:
        ModelError: torch knows no such device, or the machine has none.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(1, dtype=torch.float32, device=resolved).fill_(0).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(f"device: {str(device)!r} cannot be used here ({_device_fault(device, error)}") from error
    return torch.device("cpu") if resolved.type == "cpu" else resolved  # whose number says nothing


def _device_fault(device: str | torch.device, error: BaseException) -> str:
    """Why a device cannot be used, and what to do."""
    if torch.cuda.is_available():
        return f"{_known(device, error)}); use auto, cpu or cuda"
    if not str(device).startswith("cuda"):
        return f"{_known(device, error)}); use auto or cpu"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA); use auto or cpu, or install a torch with CUDA"
    return "CUDA finds no GPU); use auto or cpu, or make a GPU visible (driver, CUDA_VISIBLE_DEVICES)"


def _known(device: str | torch.device, error: BaseException) -> str:
    """What torch says, but for its list of all kinds of devices."""
    try:
        torch.device(device)
    except RuntimeError:
        return "torch knows no such device"
    return one_line(error)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the warnings and progress bars of transformers off the terminal; what they had been set to comes back.

    Yields:
        None: while they are off.
    """
    from transformers.utils import logging

    verbosity, bars_shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars_shown:
            logging.enable_progress_bar()


def resolve_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Turn the name of a dtype into the dtype.

    Args:
        dtype: a dtype of floats, its name, or "auto".

    Returns:
        The dtype; "auto" for "auto".

    Raises:
        ModelError: nothing is compressed from that dtype.
    """
    if dtype == "auto":
        return "auto"
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype: {name!r} is not a dtype to compress from; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def check_in_memory(
    model: nn.Module, *, dtype: str | torch.dtype = "auto", model_class: str | type | None = None, revision: str | None = None
) -> None:
    """Refuse a model in memory that must not be compressed, and settings that only a folder has a use for; it is not changed.

    Args:
        model: any module.
        dtype: as the user gave it.
        model_class: as the user gave it.
        revision: as the user gave it.

    Raises:
        ModelError: it is quantized, carries adapters, or has parameters without values; or a setting would not be read.
    """
    where = type(model).__name__
    if dtype != "auto":
        raise ModelError(f"dtype: {str(dtype)!r} was given for a model in memory, which stays as it is; cast it first, or leave dtype out")
    if model_class is not None:
        raise ModelError(f"model_class: {model_class!r} was given for a model in memory, which has its class; leave model_class out")
    check_no_revision(revision, "a model in memory")
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        check_not_quantized(config.to_dict(), where)
    quantized = next((name for name, module in model.named_modules() if isinstance(module, QuantizedLayer)), None)
    if quantized is not None or getattr(model, "hf_quantizer", None) is not None:
        found = f" ({quantized} is)" if quantized else ""
        raise ModelError(f"{where}: the model is quantized already{found}; compress the model that it was made from")
    if getattr(model, "peft_config", None):
        raise ModelError(f"{where}: adapters of peft are attached; merge them into the model first (merge_and_unload)")
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = next((name for name, tensor in tensors if tensor.is_meta), None)
    if empty is not None:
        raise ModelError(f"{where}: {empty} is on the meta device and has no values; load the weights first")


_NO_MODELS = ("Config", "Processor", "ProcessorFast", "Tokenizer", "TokenizerFast", "Extractor", "Pipeline", "Output", "Outputs")
"""How the names of other classes of transformers end."""


def resolve_class(model_class: str | type | None) -> Any:
    """Find a class of transformers to load with.

    Args:
        model_class: a class, its name, or None for AutoModelForCausalLM.

    Returns:
        The class.

    Raises:
        ModelError: transformers has no such class; the nearest names are given.
    """
    import transformers

    if isinstance(model_class, type):
        return model_class
    name = _DEFAULT_CLASS if model_class is None else model_class
    found = getattr(transformers, name, None)
    makes_models = hasattr(found, "from_config") or (isinstance(found, type) and issubclass(found, nn.Module))  # no config, no tokenizer
    if not (makes_models and hasattr(found, "from_pretrained")):
        meant = next((f"{name.removesuffix(end)}Model" for end in _NO_MODELS if name.endswith(end)), name)
        near = nearest(meant, [one for one in dir(transformers) if not one.endswith(_NO_MODELS)], count=3)
        hint = f" (nearest: {', '.join(near)})" if near else ""
        raise ModelError(f"model_class: {name!r} is no model class of transformers{hint}; name one, such as AutoModel")
    return found


def _load_weights(
    folder: Path, loader: Any, dtype: str | torch.dtype, trust_remote_code: bool, config_folder: str | Path | None
) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import AutoConfig

    try:
        config = None
        if config_folder is not None:
            config = AutoConfig.from_pretrained(config_folder, local_files_only=True, trust_remote_code=trust_remote_code)
        model, info = loader.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_loading_info names them; transformers would print a table
        )
    except LOAD_ERRORS as error:
        raise ModelError(f"{folder}: {loader.__name__} cannot load it ({one_line(error)}); {remedy(error)}") from error
    return model, info


def check_loading_info(folder: Path, info: Mapping[str, Any], config: Mapping[str, Any], *, may_leave_weights: bool) -> None:
    """Refuse a folder that does not hold the weights of its model, no more and no less.

    Args:
        folder: of the model.
        info: what transformers says of loading it.
        config: its config.json.
        may_leave_weights: the class was named, and need not take all.

    Raises:
        ModelError: weights are missing, of another shape, or have no place.
    """
    missing, unexpected = info["missing_keys"], info["unexpected_keys"]
    mismatched = [key for key, *_ in info["mismatched_keys"]]
    named = config.get("architectures")
    wanted_class = named[0] if isinstance(named, list) and named else "AutoModel"
    if mismatched:
        raise ModelError(
            f"{folder}: {len(mismatched)} weights have another shape than config.json says ({some(mismatched)}); restore the files"
        )
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} weights of the model are not in its files ({some(missing)}) and would be random; "
            f"restore the files, or name the class they belong to (config.json says model_class={wanted_class!r})"
        )
    if unexpected and not may_leave_weights:
        raise ModelError(
            f"{folder}: {len(unexpected)} weights in its files have no place in the model ({some(unexpected)}) and would be lost; "
            f"name the class to load (config.json says model_class={wanted_class!r})"
        )


def check_class(folder: Path, model: nn.Module, config: Mapping[str, Any]) -> None:
    """Refuse another class than the one that config.json names, where nobody asked for it: its weights may fit, and its name be lost.

    Args:
        folder: of the model.
        model: as AutoModelForCausalLM made it.
        config: its config.json.

    Raises:
        ModelError: transformers has the class that is named, and the model is none.
    """
    import transformers

    listed = config.get("architectures")
    named = listed[0] if isinstance(listed, list) and listed else None
    wanted = getattr(transformers, named, None) if isinstance(named, str) else None
    # A folder's own code may call its class as transformers does.
    if isinstance(wanted, type) and not isinstance(model, wanted) and type(model).__name__ != named:
        raise ModelError(
            f"{folder}: config.json says that this is a {named}, and {_DEFAULT_CLASS} makes a {type(model).__name__} of it; name the class "
            f"to load, model_class={named!r} or, if it is meant, {_DEFAULT_CLASS!r}"
        )


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """Read generation_config.json: transformers puts its defaults in the place of one that it cannot read, where it reads one at all.

    Args:
        folder: of a model.

    Returns:
        What it says; None where the folder holds none.

    Raises:
        ModelError: it cannot be read, or transformers takes it for none.
    """
    from transformers import GenerationConfig

    path = folder / _GENERATION_FILE
    if not path.exists():
        return None
    read_json(path)
    try:
        with quiet_transformers():
            return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except LOAD_ERRORS as error:
        raise ModelError(f"{path}: transformers cannot read it ({one_line(error)}); restore the file") from error


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder.

    Args:
        folder: of a model.
        trust_remote_code: run Python files of the folder, where its config asks for them.

    Returns:
        The tokenizer; None where the folder holds none.

    Raises:
        ModelError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # the package tokenizers, written in Rust, raises Exception itself
        if type(error) is not Exception and not isinstance(error, LOAD_ERRORS):
            raise
        advice = remedy(error, "restore its files, or install the tokenizers and transformers that wrote them")
        raise ModelError(f"{folder}: its tokenizer cannot be loaded ({one_line(error)}); {advice}") from error


def _refuse_lazy(model: nn.Module) -> None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, tensor in tensors if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer)]
    if lazy:
        raise ModelError(f"{type(model).__name__}: {some(lazy)}: a lazy layer has no shape yet; call the model on a batch first")


def untie(loaded: LoadedModel) -> str:
    """Give an output layer that shares the weights of the embeddings weights of its own. Changes the model and its config.

    Args:
        loaded: from a folder.

    Returns:
        A note for the report.

    Raises:
        ModelError: the model came from memory, where others may hold on to the tie.
    """
    if loaded.from_memory:
        raise ModelError("tie_word_embeddings: False was given for a model in memory; untie it first, or give the folder")
    model: Any = loaded.model
    head, table = ends_of(model)
    if head is None or table is None or head.weight is not table.weight:
        return "tie_word_embeddings: False was given, and the output layer shares no weights with the embeddings: nothing was untied"
    head.weight = nn.Parameter(table.weight.detach().clone(), requires_grad=table.weight.requires_grad)
    for part in {id(one): one for one in (model.config, text_config(model.config))}.values():
        part.tie_word_embeddings = False
    model.all_tied_weights_keys = {
        name: tied for name, tied in model.all_tied_weights_keys.items() if model.get_submodule(name.rpartition(".")[0]) is not head
    }
    return "the output layer has weights of its own now (tie_word_embeddings)"


def remedy(error: BaseException, otherwise: str = "check its files, or name another class with model_class") -> str:
    """Say what may be done about a model that does not load.

    Args:
        error: one of `LOAD_ERRORS`.
        otherwise: where the error does not tell.

    Returns:
        The end of a message.
    """
    if "trust_remote_code" in str(error):
        return "set trust_remote_code (--trust-remote-code) if you trust the Python files in the folder"
    if isinstance(error, ImportError):
        return "install what is missing"
    return otherwise
