"""Write a graph whole or not at all, with its data in a file beside it where it is larger than protobuf takes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import onnx

from compressor.errors import OutputError

_LIMIT = 2**31 - 2**20


def write_graph(model: onnx.ModelProto, path: Path, limit_bytes: int = _LIMIT) -> None:
    """Write.

    Args:
        model: not modified.
        path: of the graph; with external data `<name>.data` lies beside it. Existing files are replaced.
        limit_bytes: from this size on, weights go to the file beside.

    Raises:
        OutputError: it cannot be written; nothing is left behind.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}; make it first")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        try:
            for written in _write(model, Path(folder), path.name, limit_bytes):  # the graph comes last: it makes the data count
                with written.open("rb") as stream:
                    os.fsync(stream.fileno())
                written.replace(path.parent / written.name)
        except OSError as error:
            raise OutputError(f"{path}: it cannot be written: {error}; free space, or choose another place") from error


def _write(model: onnx.ModelProto, folder: Path, name: str, limit_bytes: int) -> list[Path]:
    if model.ByteSize() < limit_bytes:
        onnx.save(model, folder / name)
        return [folder / name]
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    onnx.save(copy, folder / name, save_as_external_data=True, location=f"{name}.data", size_threshold=1024)
    return [folder / f"{name}.data", folder / name]
