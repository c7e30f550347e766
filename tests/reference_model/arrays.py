"""Cut the fixed token arrays of `golden/reference` from this project's own source text.

Calibration and held-out text come from files that neither the model nor the tokenizer ever saw, and from different ones. The arrays are
data fixed at one moment: every recorded number rests on them, so existing ones are never overwritten.

Run `python -m tests.reference_model.arrays golden/reference`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from compressor.errors import CompressorError, DatasetError, OutputError

FOLDERS = ("compressor", "harness", "tests")
END_OF_TEXT_ID = 0


@dataclass(frozen=True)
class OwnText:
    """One file of the project."""

    label: str
    sha256: str
    text: str


@dataclass(frozen=True)
class ArrayPlan:
    """How many sequences each array holds, and of how many tokens."""

    num_calibration: int = 128
    num_heldout: int = 256
    seq_len: int = 256


def own_texts(root: Path) -> list[OwnText]:
    """Read README.md and the Python files of the project, each content once.

    Args:
        root: the folder that holds compressor/, harness/, tests/ and README.md.
    Returns:
        Files that say something, in the order of their content's hash: as good as shuffled, and the same everywhere.
    """
    paths = [root / "README.md", *(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))]
    files: dict[str, OwnText] = {}
    for path in sorted(path for path in paths if path.is_file()):
        text = path.read_text(encoding="utf-8")
        if text.strip():
            digest = hashlib.sha256(text.encode()).hexdigest()
            files.setdefault(digest, OwnText(path.relative_to(root).as_posix(), digest, text))
    return [files[digest] for digest in sorted(files)]


def cut_arrays(files: Sequence[OwnText], tokenizer: Tokenizer, plan: ArrayPlan) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    """Give whole files to calibration until it is full and all others to held-out, then cut both into sequences.

    Args:
        files: the text, in the order in which it is given away.
        tokenizer: the tokenizer of the model.
        plan: the sizes.
    Returns:
        Calibration [num_calibration, seq_len] and held-out [num_heldout, seq_len], int32, and the record of what went where.
    Raises:
        DatasetError: the text is too short; the message says by how much.
    """
    pieces = {file.sha256: [END_OF_TEXT_ID, *tokenizer.encode(file.text).ids] for file in files}
    needed_calibration, needed_heldout = plan.num_calibration * plan.seq_len, plan.num_heldout * plan.seq_len
    calibration: list[OwnText] = []
    num_given = 0
    for file in files:
        if num_given >= needed_calibration:
            break
        calibration.append(file)
        num_given += len(pieces[file.sha256])
    heldout = list(files[len(calibration) :])
    num_left = sum(len(pieces[file.sha256]) for file in heldout)
    missing = max(0, needed_calibration - num_given) + max(0, needed_heldout - num_left)
    if missing:
        raise DatasetError(
            f"own source text: {num_given + num_left} tokens in {len(files)} files are {missing} too few "
            f"for {needed_calibration} calibration and {needed_heldout} held-out tokens; "
            f"ask for fewer sequences or come back when the project has grown"
        )
    record: dict[str, object] = {
        "calibration": {"files": _names(calibration), "sequences": plan.num_calibration},
        "heldout": {"files": _names(heldout), "sequences": plan.num_heldout},
        "seq_len": plan.seq_len,
        "files_sha256": hashlib.sha256("".join(f"{file.label} {file.sha256}\n" for file in files).encode()).hexdigest(),
    }
    return _cut(calibration, pieces, needed_calibration, plan), _cut(heldout, pieces, needed_heldout, plan), record


def write_arrays(root: Path, folder: Path, plan: ArrayPlan) -> list[Path]:
    """Write calibration.safetensors, heldout.safetensors and arrays.json beside the model.

    Args:
        root: the project.
        folder: the reference model's folder, with its tokenizer.json.
        plan: the sizes.
    Returns:
        The files written.
    Raises:
        DatasetError: the tokenizer is missing or the text too short.
        OutputError: one of the files is there already.
    """
    names = ("calibration.safetensors", "heldout.safetensors", "arrays.json")
    existing = [name for name in names if (folder / name).exists()]
    if existing:
        raise OutputError(
            f"{folder}: {', '.join(existing)} exist and every recorded number rests on them; delete them first to measure all anew"
        )
    if not (folder / "tokenizer.json").is_file():
        raise DatasetError(f"{folder}: holds no tokenizer.json; train the reference model first")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    calibration, heldout, record = cut_arrays(own_texts(root), tokenizer, plan)
    record["tokenizer_sha256"] = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    save_file({"input_ids": calibration}, folder / names[0])
    save_file({"input_ids": heldout}, folder / names[1])
    (folder / names[2]).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return [folder / name for name in names]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the arrays and name them.

    Args:
        argv: the command line, that of the process if None.
    Returns:
        0, or 2 after a one-line error.
    """
    parser = argparse.ArgumentParser(prog="tests.reference_model.arrays", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the reference model's folder")
    parser.add_argument("--root", type=Path, default=Path(), help="the project (default: here)")
    parser.add_argument("--num-calibration", type=int, default=ArrayPlan.num_calibration)
    parser.add_argument("--num-heldout", type=int, default=ArrayPlan.num_heldout)
    parser.add_argument("--seq-len", type=int, default=ArrayPlan.seq_len)
    args = parser.parse_args(argv)
    try:
        written = write_arrays(args.root, args.folder, ArrayPlan(args.num_calibration, args.num_heldout, args.seq_len))
    except CompressorError as error:
        print(f"reference_arrays: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


def _names(files: Sequence[OwnText]) -> dict[str, str]:
    return {file.label: file.sha256 for file in sorted(files, key=lambda file: file.label)}


def _cut(files: Sequence[OwnText], pieces: dict[str, list[int]], num_tokens: int, plan: ArrayPlan) -> torch.Tensor:
    stream = [token for file in files for token in pieces[file.sha256]]
    return torch.tensor(stream[:num_tokens], dtype=torch.int32).view(-1, plan.seq_len)


if __name__ == "__main__":
    raise SystemExit(main())
