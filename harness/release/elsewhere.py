"""Loads a checkpoint with whatever transformers runs this file, and prints what it predicts as JSON.

It is run by the Python of another environment, `python elsewhere.py FOLDER TOKEN...`, so it imports nothing of this project and keeps to
what old versions know. `cannot` in the answer says that nothing could be tried, `error` that loading or running failed.
"""

from __future__ import annotations

import json
import sys


def _answer(folder: str, ids: list[int]) -> dict[str, object]:
    try:
        import compressed_tensors
        import torch
        import transformers
    except ImportError as error:
        return {"cannot": str(error)}
    answer: dict[str, object] = {
        "transformers": transformers.__version__,
        "compressed-tensors": getattr(compressed_tensors, "__version__", "unknown"),
        "torch": torch.__version__,
    }
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([ids])).logits[0].float()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what this version says of the checkpoint
        return {**answer, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {**answer, "largest": logits.abs().max().item(), "last": logits[-1].tolist()}


if __name__ == "__main__":
    print(json.dumps(_answer(sys.argv[1], [int(one) for one in sys.argv[2:]])))
