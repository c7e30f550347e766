"""Embeddings that keep their table in the format of the file and unpack only the rows that are looked up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compressor.errors import SchemeError
from compressor.nn.layer import SCHEME, STORED, Fp4Weight, PackedWeight, PlainWeight, QuantizedLayer
from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import values_as_read
from compressor.numerics.scheme import QuantizationScheme
from compressor.settings.kinds import TENSOR, object_of
from compressor.settings.options import check_kind, checked


class QuantizedEmbedding(QuantizedLayer):
    """An embedding with a quantized table.

    Build one with `from_embedding`; the subclass follows from the scheme's compression format.

    Attributes:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        padding_idx: as in nn.Embedding, where it matters for gradients only.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        scheme: QuantizationScheme,
        padding_idx: int | None,
        dtype: torch.dtype,
        name: str = "",
    ) -> None:
        """Set the shape and the scheme; the buffers come with `store` or `register_empty`."""
        super().__init__(num_embeddings, embedding_dim, scheme, dtype, name)
        if scheme.input_activations is not None:
            raise SchemeError(f"{self.where}: input_activations were given for an embedding, whose inputs are numbers; leave them out")
        if self.weight_args.strategy == "block":
            raise SchemeError(f"{self.where}: strategy='block' was given for an embedding, read row by row; use 'channel' or 'group'")
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx

    @staticmethod
    @checked(embedding=object_of(nn.Embedding, words="an Embedding"), **STORED)
    def from_embedding(
        embedding: nn.Embedding,
        scheme: QuantizationScheme,
        codes_RC: Tensor,
        qparams: QParams,
        *,
        g_idx_C: Tensor | None = None,
        name: str = "",
    ) -> QuantizedEmbedding:
        """Put codes in the place of a float table.

        Args:
            embedding: the module that is replaced; a plain nn.Embedding.
            scheme: format of the weight.
            codes_RC: [R, C] int8 or float8_e4m3fn.
            qparams: scale, zero point and global scale of the table.
            g_idx_C: [C] int32 group of each column, for activation-ordered groups; None for groups in order.
            name: dotted name of the layer, for errors.

        Returns:
            A layer of the class that stores the scheme's format.

        Raises:
            SchemeError: no layer stores this format, codes or scales do not fit, or the embedding does more than look up.
        """
        check_plain_embedding(embedding, name)
        layer = QuantizedEmbedding.class_of(scheme)(
            embedding.num_embeddings, embedding.embedding_dim, scheme, embedding.padding_idx, embedding.weight.dtype, name
        )
        layer.store(codes_RC, qparams, g_idx_C)
        return layer.train(embedding.training)

    @staticmethod
    @checked(scheme=SCHEME)
    def class_of(scheme: QuantizationScheme) -> type[QuantizedEmbedding]:
        """Return the class that stores the format of a scheme."""
        return _LAYERS[scheme.compression_format]

    def forward(self, input: Tensor) -> Tensor:
        """Look rows up and dequantize them, as many as there are ids.

        Args:
            input: ids, integers from 0 to num_embeddings - 1, any shape.

        Returns:
            [..., C].

        Raises:
            SchemeError: ids are not integers.
        """
        check_kind("input", input, TENSOR)
        if input.is_floating_point() or input.is_complex() or input.dtype == torch.bool:
            raise SchemeError(f"{self.where}: ids of {input.dtype} were given to an embedding; give int64 or int32")
        if self._materialized is not None:
            return nn.functional.embedding(input, self._materialized)
        rows_N = input.reshape(-1)
        qparams = self.weight_qparams()
        if self.weight_args.strategy != "tensor":
            qparams = qparams.map(lambda part: _rows(part, rows_N))
        codes_NC, g_idx_C = self.codes_of_rows(rows_N), getattr(self, "weight_g_idx", None)
        return values_as_read(codes_NC, qparams, self.weight_args, self.dtype, g_idx_C).reshape(*input.shape, self.embedding_dim)

    def codes_of_rows(self, rows_N: Tensor) -> Tensor:
        """Return the codes of some rows, [N, C]."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Shape, format and bits, as nn.Embedding shows its own."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {super().extra_repr()}"


class PackQuantizedEmbedding(PackedWeight, QuantizedEmbedding):
    """A table of integer codes of 2 to 8 bits, packed densely into int32 (format `pack-quantized`)."""


class NaiveQuantizedEmbedding(PlainWeight, QuantizedEmbedding):
    """A table with one byte per code (`int-quantized`, `float-quantized`, `mxfp8-quantized`)."""


class Fp4QuantizedEmbedding(Fp4Weight, QuantizedEmbedding):
    """A table of fp4 codes, two to a byte (`nvfp4-pack-quantized`, `mxfp4-pack-quantized`)."""


def check_plain_embedding(embedding: nn.Embedding, name: str) -> None:
    """Refuse an embedding that does more than look up.

    Args:
        embedding: any embedding.
        name: its dotted name, for the error.

    Raises:
        SchemeError: it renormalizes its rows, or its class has a forward of its own.
    """
    where = name or type(embedding).__name__
    if embedding.max_norm is not None:
        raise SchemeError(f"{where}: max_norm={embedding.max_norm} changes the table in every forward, which codes cannot; ignore it")
    if type(embedding).forward is not nn.Embedding.forward:
        raise SchemeError(f"{where}: {type(embedding).__name__} has a forward of its own, which a quantized table would lose; ignore it")


def _rows(part: Tensor, rows_N: Tensor) -> Tensor:
    return part.index_select(0, rows_N)


_LAYERS: dict[str, type[QuantizedEmbedding]] = {
    "pack-quantized": PackQuantizedEmbedding,
    "int-quantized": NaiveQuantizedEmbedding,
    "float-quantized": NaiveQuantizedEmbedding,
    "mxfp8-quantized": NaiveQuantizedEmbedding,
    "nvfp4-pack-quantized": Fp4QuantizedEmbedding,
    "mxfp4-pack-quantized": Fp4QuantizedEmbedding,
}
