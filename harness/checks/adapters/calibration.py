"""Our own oneshot as a subject of the catalogue, on tiny models.

from harness import check
from harness.checks.adapters.calibration import OurCalibration

print(check(OurCalibration()))
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressor import oneshot
from compressor.algorithms.gptq import quantize_gptq
from compressor.json_text import from_json
from compressor.modifiers import gptq
from compressor.nn import QuantizedLayer
from compressor.random_state import random_numbers_kept
from harness.checks.protocols import Calibrated

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160}
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}


@dataclass
class OurCalibration:
    """GPTQ, or another modifier of a recipe, over a tiny llama; starved with a tiny mixtral.

    Attributes:
        modifier: name in a recipe.
        settings: of the modifier; by default 4-bit integers in groups of 16.
        seed: of the weights.
    """

    modifier: str = "GPTQModifier"
    settings: Mapping[str, Any] | None = None
    seed: int = 0
    kind: ClassVar[str] = "calibration"
    tags: ClassVar[frozenset[str]] = frozenset()
    vocabulary: ClassVar[int] = 96

    @property
    def name(self) -> str:
        """See Calibration."""
        return f"oneshot-{self.modifier}"

    def run(self, rows: Sequence[Tensor], *, batch_size: int = 1, sequential: bool = True, num_layers: int = 2) -> Calibrated:
        """See Calibration."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(vocab_size=self.vocabulary, num_hidden_layers=num_layers, **_SIZES)
        return self._compress(self._drawn(LlamaForCausalLM, config), rows, batch_size, sequential, None)

    def run_starved(self, *, budget: int | None) -> Calibrated | None:
        """See Calibration."""
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(vocab_size=self.vocabulary, num_hidden_layers=1, num_local_experts=8, num_experts_per_tok=1, **_SIZES)
        rows = [torch.arange(3, 6)]
        return self._compress(self._drawn(MixtralForCausalLM, config), rows, 1, True, 10_000 if budget is None else budget)

    def command(self, rows: Path, out: Path) -> Sequence[str] | None:
        """See Calibration."""
        subject = json.dumps([self.modifier, self.settings, self.seed])
        return [sys.executable, "-m", "harness.checks.adapters.calibration", subject, str(rows), str(out), str(torch.get_num_threads())]

    def _drawn(self, kind: Any, config: Any) -> nn.Module:
        with random_numbers_kept(foreign=False):
            torch.manual_seed(self.seed)
            model: nn.Module = kind(config)
        return model.eval()

    def _compress(self, model: nn.Module, rows: Sequence[Tensor], batch_size: int, sequential: bool, budget: int | None) -> Calibrated:
        settings = dict(self.settings or {"config_groups": {"all": {"targets": ["Linear"], "weights": _WEIGHTS}}})
        ignored = ["lm_head", *(name for name, module in model.named_modules() if name.endswith("mlp.gate"))]
        settings |= {"ignore": ignored} | ({} if budget is None else {"fallback_budget": budget})
        recipe = {"check_stage": {"check_modifiers": {self.modifier: settings}}}
        with _statistics() as statistics, _counted(model) as counts:
            # In one pass modules also see the error of their own layer, which nothing in the basic pipeline does.
            options = {"pipeline": "sequential", "passes": "two"} if sequential else {"pipeline": "basic"}
            result = oneshot(model, recipe=recipe, dataset=list(rows), batch_size=batch_size, **options)
        layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}
        found = {name: layer.weight_qparams().global_scale for name, layer in layers.items()}
        seen = counts | {name: 0 for name in layers if name not in counts}
        return Calibrated(
            {key: value.detach().clone().contiguous() for key, value in model.state_dict().items()},
            {name: layer.codes() for name, layer in layers.items()},
            statistics,
            {name: count for name, count in seen.items() if name in layers},
            {fallback.module: fallback.kind for fallback in result.report.fallbacks},
            {name: scale for name, scale in found.items() if scale is not None},
        )


@contextlib.contextmanager
def _statistics() -> Iterator[dict[str, Tensor]]:
    """Note every Hessian that reaches the solver."""
    found: dict[str, Tensor] = {}

    def noting(weights: Any, hessian_CC: Tensor, *args: Any, names: Sequence[str], **named: Any) -> Any:
        found.update({name: hessian_CC.clone() for name in names})
        return quantize_gptq(weights, hessian_CC, *args, names=names, **named)

    with mock.patch.object(gptq, quantize_gptq.__name__, noting):
        yield found


@contextlib.contextmanager
def _counted(model: nn.Module) -> Iterator[dict[str, int]]:
    """Count the tokens that linear layers see, those that appear during the run (single experts) included."""
    counts: dict[str, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Linear) and args and isinstance(args[0], Tensor):
            name = next((name for name, one in model.named_modules() if one is module), "")
            counts[name] = counts.get(name, 0) + args[0].numel() // args[0].shape[-1]

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield counts
    finally:
        handle.remove()


def main(argv: Sequence[str]) -> None:
    """Run once, for check 43.

    Args:
        argv: the subject as JSON, the file of the rows, the file to write, the number of threads.
    """
    torch.set_num_threads(int(argv[3]))
    modifier, settings, seed = from_json(argv[0])
    rows = load_file(argv[1])["input_ids"]
    save_file(dict(OurCalibration(modifier, settings, seed).run(list(rows)).tensors), argv[2])


if __name__ == "__main__":
    main(sys.argv[1:])
