"""Classes of transformers that cannot read a compressed checkpoint of theirs, whatever its scheme: known before the run."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping

import torch
from torch import nn

from compressor.errors import SchemeError
from compressor.nn import QuantizedLayer
from compressor.numerics.scheme import QuantizationScheme


def class_notes(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> list[str]:
    """Say that the class of a model initializes weights that quantized layers do not have, so that `from_pretrained` stops.

    transformers calls `_init_weights` for modules whose weights it has not found under the name `weight`. Most classes ask whether there
    is one; those that do not raise. That is tried on a model of the same class without bytes.

    Args:
        model: compressed or not; not changed.
        schemes: dotted name of every module that will be quantized to its scheme.

    Returns:
        A sentence, or none: also where transformers unpacks all weights before it looks. Of what is no model of transformers, or cannot be
        built from its config, nothing is known.
    """
    from transformers import PreTrainedModel

    from compressor.model.format import hides_weight, unpacked_at_once
    from compressor.model.load import quiet_transformers

    if not isinstance(model, PreTrainedModel) or unpacked_at_once(schemes, model):
        return []
    try:
        with quiet_transformers(), torch.device("meta"):
            twin = type(model)(copy.deepcopy(model.config))
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, ImportError):
        return []
    there = dict(twin.named_modules())
    for name, scheme in schemes.items():
        if name in there and hides_weight(scheme) and not isinstance(there[name], QuantizedLayer):
            there[name]._parameters.pop("weight", None)
    for module in there.values():
        try:
            twin._init_weights(module)
        except AttributeError as error:
            return [
                f"transformers does not load quantized layers of {type(model).__name__} ({error}, of which its _init_weights asks); "
                "compressor.load_compressed reads the checkpoint"
            ]
        except (RuntimeError, NotImplementedError):  # asks for values, which are not here
            continue
    return []


def check_tied_config(model: nn.Module, names: Collection[str]) -> None:
    """Refuse to quantize a head or an embedding that config.json ties to the other, while their weights differ.

    transformers leaves such weights apart while both are floats; of a quantized one it looks for the weight that it would tie, and stops.

    Args:
        model: compressed or not.
        names: dotted names of the modules that are quantized.

    Raises:
        SchemeError: one of them is such a head or embedding.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    ends = [part for part in (model.get_output_embeddings(), model.get_input_embeddings()) if part is not None]
    torn = next((name for name, module in model.named_modules() if name in names and any(module is end for end in ends)), None)
    if torn is not None:
        raise SchemeError(
            f"{torn}: config.json says that head and embedding are tied (tie_word_embeddings), but their weights differ, and transformers "
            f"would not load it quantized; set tie_word_embeddings to false in the config, or ignore {torn}"
        )
