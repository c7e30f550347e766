"""Finding the layers that end an MLP: each reads what another linear layer gives, token by token and channel by channel.

Some channels of two tokens are changed in what a linear layer gives. A layer of whose input just these channels of just these tokens
change reads it through a nonlinearity or a gate, and nothing else: attention carries a change of the first token's keys and values to the
last, and mixes what the last is shown where its queries change (the first often sees itself alone, whatever it asks); a norm carries it to
other channels. No architecture is known by name.

Shapes: N tokens, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compressor.data.collate import Batch
from compressor.errors import TargetError
from compressor.mappings.basis import Watch
from compressor.mappings.pairs import pattern_of
from compressor.mappings.probe import Prober, all_experts
from compressor.model.evaluation import evaluation_mode
from compressor.nn.build import is_quantizable
from compressor.progress import Progress, SilentProgress
from compressor.tracing.footprint import Footprint


def find_inner(model: nn.Module, batch: Batch, device: torch.device, *, progress: Progress | None = None) -> tuple[str, ...]:
    """Find the last layers of a model's MLPs, experts among them.

    Args:
        model: as it was afterwards; in any float dtype.
        batch: of token ids; an excerpt of it is used.
        device: of the model.
        progress: where a bar is shown.

    Returns:
        Dotted names of linear layers, in the order of the model.

    Raises:
        TargetError: there are none that have a weight of their own.
        TracingError: the forward fails, or gives other bits when it is run again.
        NumericsError: it gives NaN.
    """
    prober = Prober(model, batch, device, in_front=True)  # where a rotation of their inputs will stand, or stands
    with evaluation_mode(model), Footprint(model), all_experts(model), torch.no_grad():
        prober.run_plainly()
        sources: dict[str, str] = {}
        for name, module in prober.modules.items():
            if name in prober.widths and name in prober.inputs and _is_linear(module):
                sources.setdefault(pattern_of(name), name)
        kinds: set[str] = set()
        with (progress or SilentProgress()).task("find the last layers of MLPs", total=len(sources)) as task:
            for source in sources.values():
                watch = _SomeChannels(prober, source)
                if not watch.run():
                    kinds |= {pattern_of(name) for name in watch.readers}
                task.advance()
    found = [name for name, module in prober.modules.items() if pattern_of(name) in kinds and _is_linear(module)]
    alone = tuple(name for name in found if name not in prober.tied)
    if found and not alone:
        raise TargetError(f"{found[0]}, which ends an MLP, is tied to {prober.tied[found[0]]}")
    if not alone:
        raise TargetError("no linear layer reads what another one gives channel by channel, as those do that end an MLP")
    return alone


_ALIVE = 0.01  # of the largest output


class _SomeChannels(Watch):
    """Some channels of two tokens change in what a layer gives: of the first and last not zero everywhere, as an embedding's padding is."""

    def __init__(self, prober: Prober, source: str) -> None:
        """Take the layer."""
        super().__init__(prober, {source})
        width = prober.widths[source]
        drawn_D = torch.rand(width, generator=torch.Generator().manual_seed(width), dtype=torch.float32)
        self._chosen_D = drawn_D.argsort() < max(1, width // 4)
        self._tokens = [0]

    def changed(self, output: Tensor) -> Tensor:
        """Add to them what no activation cuts off."""
        changed_ND = output.clone().reshape(-1, output.shape[-1])
        chosen_D = self._chosen_D.to(output.device)
        size_N = changed_ND.abs().amax(-1)
        alive = (size_N >= _ALIVE * size_N.amax()).nonzero().flatten().tolist()
        self._tokens = sorted({alive[0], alive[-1]}) if len(size_N) > 2 else alive[:1]  # another must be left that stays as it was
        changed_ND[torch.tensor(self._tokens, dtype=torch.int64, device=output.device)[:, None], chosen_D] += 4 * output.abs().amax() + 1
        return changed_ND.reshape(output.shape)

    def is_changed(self, x: Tensor, base: Tensor) -> bool:
        """Say whether only these tokens differ, and only in channels that come from chosen ones."""
        off_ND = (x != base).reshape(-1, x.shape[-1])
        width, columns = len(self._chosen_D), x.shape[-1]
        if len(off_ND) < 2 or self._tokens[-1] >= len(off_ND) or width % columns:
            return False
        off_D = off_ND[self._tokens].any(0)
        off_ND[self._tokens] = False
        if bool(off_ND.any()):
            return False
        chosen = self._chosen_D.to(x.device)
        # Gate and up of one layer lie one after the other, or alternate.
        ways = chosen.reshape(-1, columns).any(0), chosen.reshape(columns, -1).any(1)
        return any(not bool((off_D & ~way).any()) for way in ways)


def _is_linear(module: nn.Module) -> bool:
    return is_quantizable(module) and not isinstance(module, nn.Embedding)
