"""Write a graph whole or not at all, with its data in a file beside it where it is larger than protobuf takes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx

from compressor.errors import OutputError
from compressor.model.atomic_file import whole_file

_LIMIT = 2**31 - 2**20


def write_graph(model: onnx.ModelProto, path: Path, limit_bytes: int = _LIMIT) -> None:
    """Write.

    Args:
        model: not modified.
        path: of the graph; with external data `<name>.data` lies beside it. Existing files are replaced.
        limit_bytes: from this size on, weights go to the file beside.

    Raises:
        OutputError: there is no such folder.
        CheckpointError: it cannot be written; nothing is left behind.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}; make it first")
    if model.ByteSize() < limit_bytes:
        with whole_file(path) as partial:
            onnx.save(model, partial)
        return
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    data = path.with_name(f"{path.name}.data")
    onnx.external_data_helper.convert_model_to_external_data(copy, location=data.name, size_threshold=1024)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder, whole_file(path) as partial:
        onnx.external_data_helper.write_external_data_tensors(copy, folder)
        with whole_file(data) as partial_data:
            (Path(folder) / data.name).replace(partial_data)
        onnx.save(copy, partial)  # the graph comes last: it makes the data count
