"""Loads a checkpoint with whatever transformers runs this file, and prints two answers as JSON: the versions, then what it predicts.

It is run by the Python of another environment, `python elsewhere.py FOLDER TOKEN...`, so it imports nothing of this project and keeps to
what old versions know. Without the first answer nothing could be tried; without the second one loading or running failed.
"""

from __future__ import annotations

import json
import sys

import compressed_tensors
import torch
import transformers

MARK = "harness: "
"""Begins a line with an answer, for libraries print too."""


def _main(folder: str, ids: list[int]) -> None:
    modules = {"transformers": transformers, "compressed-tensors": compressed_tensors, "torch": torch}
    versions = {name: str(getattr(module, "__version__", "unknown")) for name, module in modules.items()}
    print(MARK + json.dumps(versions), flush=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([ids])).logits[0, -1].float()
    print(MARK + json.dumps(logits.tolist()))


if __name__ == "__main__":
    _main(sys.argv[1], [int(one) for one in sys.argv[2:]])
