"""Writes greedy text with whatever vLLM runs this file, and prints two answers as JSON: the versions, then the tokens of each text.

It is run by the Python of another environment, `python with_vllm.py FOLDER NEW_TOKENS`, with a prompt a line on the standard input, so it
imports nothing of this project. Without the first answer nothing could be tried; without the second one loading or running failed.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import transformers
import vllm

MARK = "harness: "
"""Begins a line with an answer, for libraries print too."""


def _main(folder: str, num_new: int, prompts: list[list[int]]) -> None:
    modules = {"vllm": vllm, "transformers": transformers, "torch": torch}
    print(MARK + json.dumps({name: str(module.__version__) for name, module in modules.items()}), flush=True)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no second process: what it says of an error would not be the last line
    model = vllm.LLM(
        folder,
        max_model_len=max(map(len, prompts)) + num_new,
        max_num_seqs=len(prompts),
        enforce_eager=True,
        gpu_memory_utilization=0.01,  # both models of the sign-off are in memory: it may not ask for what is free of most of it
        kv_cache_memory_bytes=2**30,
    )
    texts = model.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], vllm.SamplingParams(temperature=0.0, max_tokens=num_new), use_tqdm=False
    )
    print(MARK + json.dumps([list(text.outputs[0].token_ids) for text in texts]), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), [[int(token) for token in line.split()] for line in sys.stdin])
