"""Tensors in any layout: nested ones have no shape, sparse ones no single block of memory, opaque ones no memory at all."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import CalibrationError
from compressor.numerics.checksum import checksum
from compressor.pages import raw_bytes

_SUMMED_BYTES = 1 << 16  # of more, a checksum where they lie takes a fourth of a hash's time, and on a GPU a hundredth
_WITH_MEMORY = (Tensor, nn.Parameter, nn.Buffer)
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def has_memory(tensor: Tensor) -> bool:
    """Say whether a tensor is a look at one block of memory.

    Args:
        tensor: in any layout.

    Returns:
        False for nested, sparse and opaque ones.
    """
    return tensor.layout is torch.strided and not tensor.is_nested


def shape_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the shape of a tensor.

    Args:
        tensor: in any layout.

    Returns:
        Sizes; of a nested tensor the shapes of what it holds.
    """
    return tuple(map(shape_of, tensor.unbind())) if tensor.is_nested else tuple(tensor.shape)


def kind_of(tensor: Tensor) -> str:
    """Say what a tensor is, without its values.

    Args:
        tensor: in any layout.

    Returns:
        Dtype, layout where it is unusual, and shape.
    """
    layout = "nested " if tensor.is_nested else "" if tensor.layout is torch.strided else f"{str(tensor.layout).removeprefix('torch.')} "
    return f"{str(tensor.dtype).removeprefix('torch.')} {layout}{shape_of(tensor)}"


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Take a tensor apart into dense ones, from which it could be made again.

    Args:
        tensor: in any layout.

    Returns:
        The tensor itself, what a nested one holds, indices and values, or integers with their scale and zero point.

    Raises:
        CalibrationError: it is of a class that only wraps another tensor, of which nothing is known here.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # torch.func hides a batch or a derivative in it
        tensor = torch._C._functorch.get_unwrapped(tensor)
    refuse_without_memory(tensor)
    if tensor.is_nested:
        return tuple(tensor.unbind())
    if tensor.is_quantized:
        per_channel = tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        scale = tensor.q_per_channel_scales() if per_channel else torch.tensor(tensor.q_scale(), dtype=torch.float64)
        zero = tensor.q_per_channel_zero_points() if per_channel else torch.tensor(tensor.q_zero_point(), dtype=torch.int64)
        return tensor.int_repr(), scale, zero
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _COMPRESSED:
        return (*(getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]), tensor.values())
    return (tensor if tensor.layout is torch.strided else tensor.to_dense(),)


def refuse_without_memory(tensor: Tensor, where: str = "forward") -> None:
    """Refuse a tensor that is only the shell of another one: to read at its address is to read anywhere.

    Args:
        tensor: in any layout.
        where: for the message.

    Raises:
        CalibrationError: its class says that it has a shape, and keeps the numbers in a place of its own.
    """
    kind = type(tensor)
    if kind in _WITH_MEMORY or hasattr(tensor, "__tensor_flatten__") or tensor.is_meta:
        return
    with torch._C.DisableTorchFunction():
        is_shell = has_memory(tensor) and tensor.numel() > 0 and tensor.data_ptr() == 0
    if is_shell:
        raise CalibrationError(
            f"{where}: a {kind.__name__} passes here, a subclass of torch.Tensor without memory of its own (_make_wrapper_subclass), whose "
            "numbers cannot be calibrated; hand plain tensors from layer to layer"
        )


def num_bytes(tensor: Tensor) -> int:
    """Count the bytes of the elements that a tensor holds.

    Args:
        tensor: in any layout.

    Returns:
        Bytes, those of indices included.
    """
    return sum(part.numel() * part.element_size() for part in dense_parts(tensor))


def digest(tensor: Tensor) -> str:
    """Hash the contents of a tensor.

    Args:
        tensor: on any device, in any layout.

    Returns:
        A digest of its bytes.
    """
    found = hashlib.blake2b(digest_size=12)
    with torch._C.DisableTorchFunction():
        for part in dense_parts(tensor):
            plain = part.detach().resolve_conj().resolve_neg()  # a conjugate is a mark on the bytes of another tensor
            if plain.nbytes >= _SUMMED_BYTES:
                found.update(checksum(plain).to_bytes(8, "little"))
            else:
                found.update(raw_bytes(plain).to("cpu", copy=True).numpy().data)  # memory that numpy has seen can never be resized
    return found.hexdigest()
