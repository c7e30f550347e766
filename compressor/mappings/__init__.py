"""Which scale may move where in a model: found and proved on its own forward, without a table of architectures."""

from __future__ import annotations

from compressor.mappings.explicit import explicit_pairs
from compressor.mappings.pairs import Mappings, Refusal, ScalePair, scale_channels
from compressor.mappings.probe import find_pairs

__all__ = ["Mappings", "Refusal", "ScalePair", "explicit_pairs", "find_pairs", "scale_channels"]
