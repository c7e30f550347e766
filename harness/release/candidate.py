"""Both models as the checks see them; loaded once, when the first check asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from compressor.errors import ModelError
from compressor.model.targets import text_config
from harness.release.policy import ReleasePolicy
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome
from harness.validation.loading import LOADER_ERRORS, first_line, load_compressed


@dataclass
class Candidate:
    """What is to be signed.

    Attributes:
        base: folder of the base.
        compressed: folder of the checkpoint.
        policy: the limits.
        rows: token ids of the held-out data, a list a sequence.
        device: where models run.
        seed: of what is sampled.
        texts: what was generated once, for the checks that look at it.
    """

    base: Path
    compressed: Path
    policy: ReleasePolicy
    rows: list[list[int]]
    device: torch.device
    seed: int
    texts: dict[tuple[str, bool, int], list[int]] = field(default_factory=dict)

    @cached_property
    def base_model(self) -> torch.nn.Module:
        """The base in its own dtype."""
        return self._loaded(self.base, "auto")

    @cached_property
    def model(self) -> torch.nn.Module:
        """The checkpoint in its own dtype."""
        return self._loaded(self.compressed, "auto")

    @cached_property
    def wide_base(self) -> torch.nn.Module:
        """The base in float32, where rounding hides nothing."""
        return self._loaded(self.base, "float32")

    @cached_property
    def wide_model(self) -> torch.nn.Module:
        """The checkpoint in float32."""
        return self._loaded(self.compressed, "float32")

    @cached_property
    def prompts(self) -> list[torch.Tensor]:
        """Token ids [1, T] of the prompts, each a token shorter than the one before."""
        asked = self.policy.generation
        length = min(asked.prompt_tokens, min(map(len, self.rows)))
        return [self._tensor(row[: max(2, length - number)]) for number, row in enumerate(self.rows[: asked.prompts])]

    @cached_property
    def num_positions(self) -> int:
        """Positions that the base has."""
        return int(getattr(self.base_model.config, "max_position_embeddings", None) or self.policy.generation.long_context)

    @property
    def num_new(self) -> int:
        """Tokens that are generated."""
        return max(1, min(self.policy.generation.new_tokens, self.num_positions - self.policy.generation.prompt_tokens))

    @cached_property
    def long_row(self) -> torch.Tensor:
        """Held-out tokens [1, T] up to the last position."""
        length = min(self.policy.generation.long_context, self.num_positions)
        return self._tensor([token for row in self.rows for token in row][:length])

    def _tensor(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([ids], dtype=torch.long, device=self.device)

    def _loaded(self, folder: Path, dtype: str) -> torch.nn.Module:
        return (load_wide(folder) if dtype == "float32" else _load(folder, dtype)).to(self.device)


def load_wide(folder: Path) -> torch.nn.Module:
    """Load a model in float32. Of fp4, which transformers unpacks to bfloat16 only, the numbers are widened; float32 holds them all.

    Args:
        folder: of the model.

    Returns:
        It, on the CPU.

    Raises:
        ModelError: it does not load.
    """
    attempt = load_compressed(folder, dtype="float32")
    return _widened(_load(folder, "auto")) if attempt.model is None else attempt.model


def _load(folder: Path, dtype: str) -> torch.nn.Module:
    attempt = load_compressed(folder, dtype=dtype)
    if attempt.model is None:
        raise ModelError(f"{folder.name} does not load in {dtype}: {attempt.problems[0]}; see format.loads")
    return attempt.model


def _widened(model: torch.nn.Module) -> torch.nn.Module:
    """Make float32 of all half precision; transformers refuses `float()` of what is quantized. Changes the model."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor.data = tensor.data.float()
    return model


@dataclass(frozen=True)
class Check:
    """A claim, and who looks into it. What stops the look is told, and never reads as a pass."""

    claim: Claim
    look: Callable[[Candidate], CheckRecord]

    def record(self, candidate: Candidate) -> CheckRecord:
        """Look.

        Args:
            candidate: both models.

        Returns:
            What was found; inconclusive where it could not be looked at.
        """
        try:
            with torch.no_grad():
                return self.look(candidate)
        except (ModelError, *LOADER_ERRORS) as error:
            return self.claim.record(Outcome.INCONCLUSIVE, f"could not be looked at: {first_line(error)}")


def vocabulary_of(model: torch.nn.Module) -> int:
    """Return how many tokens a model predicts."""
    return int(text_config(model.config).vocab_size)


def rounding_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that round what they are given or give.

    Args:
        model: as transformers loads a checkpoint.

    Returns:
        Name to module.
    """
    schemes = {name: getattr(module, "quantization_scheme", None) for name, module in model.named_modules()}
    return {name: model.get_submodule(name) for name, one in schemes.items() if one and (one.input_activations or one.output_activations)}
