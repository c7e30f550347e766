"""A tiny Llama in a folder, and token data: what the whole path is run on where the reference model would only cost time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests import tiny


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, bf16, saved with a tokenizer and generation config."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("base") / "llama"
    tiny.llama(vocab_size=256, hidden_size=128, intermediate_size=128).bfloat16().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(26)} | {"<unk>": 26}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokens_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen sequences of 48 tokens."""
    path = tmp_path_factory.mktemp("data") / "tokens.safetensors"
    ids = torch.randint(0, 256, (16, 48), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    save_file({"input_ids": ids}, path)
    return path


@pytest.fixture
def w4a16() -> dict[str, Any]:
    """The recipe of the main job."""
    return {"quant_stage": {"quant_modifiers": {"GPTQModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W4A16"}}}}


@pytest.fixture(scope="session")
def kill_server(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Sends one request to the process of kill_server.py, the one of all tests: to import torch takes as long as ten runs."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repo_root), "TOKENIZERS_PARALLELISM": "false"}
    log = tmp_path_factory.mktemp("kill-server") / "log"
    command = [sys.executable, str(Path(__file__).with_name("kill_server.py"))]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):

        def ask(request: dict[str, Any]) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, log.read_text(encoding="utf-8")[-3000:]
            return dict(json.loads(line))

        yield ask
