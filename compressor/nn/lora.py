"""LoRA of peft on quantized layers: the codes stay, and two small float matrices beside each layer are trained (Hu et al. 2021,
arXiv:2106.09685; on quantized weights Dettmers et al. 2023, arXiv:2305.14314).

peft adapts layers that it knows, and has a register of further ones. peft itself is imported only by who calls this.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from compressor.errors import ModelError
from compressor.nn.quantized_linear import QuantizedLinear
from compressor.settings.kinds import object_of
from compressor.settings.options import check_kind

if TYPE_CHECKING:
    from peft import LoraConfig

_ALL_LINEAR = "all-linear"  # peft's word, in any case
# Settings of LoRA that look at the float weight, which is not there, with the values that do not.
_WITHOUT_WEIGHT: dict[str, tuple[Any, ...]] = {"init_lora_weights": (True, False, "gaussian", "orthogonal"), "use_dora": (False,)}


def for_compressed(config: LoraConfig) -> LoraConfig:
    """Let LoRA take quantized linear layers, in `get_peft_model` and `PeftModel.from_pretrained`.

    Args:
        config: of peft; changed.

    Returns:
        The same object.

    Raises:
        UserInputError: `config` is none of LoRA.
        ModelError: peft is not installed, a setting needs the float weight of a layer, or no layers are named.
    """
    try:
        from peft import LoraConfig
        from peft.tuners.lora import Linear
    except ImportError as error:
        raise ModelError("for_compressed: adapters need the package peft; pip install peft") from error
    check_kind("config", config, object_of(LoraConfig, words="a LoraConfig of peft"))
    if isinstance(config.target_modules, str) and config.target_modules.lower() == _ALL_LINEAR:
        raise ModelError(
            f"target_modules: for {config.target_modules!r} peft takes float layers alone, and would pass over quantized ones; give the "
            "last parts of their names, such as ['q_proj', 'k_proj', 'v_proj', 'o_proj'], or a regular expression"
        )
    for name, allowed in _WITHOUT_WEIGHT.items():
        value = getattr(config, name)
        if not any(value is one or value == one for one in allowed):
            raise ModelError(f"{name}: {value!r} needs the float weight of a layer, and a quantized one has codes; leave it out")

    class LoraQuantizedLinear(Linear):
        """Adapters beside one quantized layer."""

        def __init__(self, *args: Any, **given: Any) -> None:
            with warnings.catch_warnings():  # peft reads in_features and out_features, and warns that it has never seen the class
                warnings.filterwarnings("ignore", message="Unsupported layer type")
                super().__init__(*args, **given)

        def _get_base_layer_device_and_dtype(self, base_layer: QuantizedLinear) -> tuple[torch.device, torch.dtype]:
            return next(base_layer.buffers()).device, base_layer.dtype

        def merge(self, *args: Any, **given: Any) -> NoReturn:
            """Refuse: codes have no room for the product of two float matrices."""
            where = self.get_base_layer().where
            raise ModelError(f"{where}: adapters cannot be merged into codes; save them, and load them beside the compressed model")

    config._register_custom_module({QuantizedLinear: LoraQuantizedLinear})
    return config
