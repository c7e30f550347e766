"""Planted bugs in the writer of checkpoints, against checks 55 to 59 on a checkpoint that the wrong writer has just written."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from compressor.errors import CompressorError
from harness.checks.adapters.ours import OurArtifact
from harness.checks.catalogue.registry import CheckContext, find_checks
from harness.mutants.family import Family, Killer
from harness.mutants.patches import Edit, Mutant, bug
from harness.reporting.verdict import Outcome
from tests import tiny

_STATE = "compressor.model.checkpoints.save:saved_state"
_TOKENIZER = "compressor.model.checkpoints.save:_write_tokenizer"
_CONFIG = "compressor.model.checkpoints.format:quantization_config"
_GROUP = {"num_bits": 4, "group_size": 32, "symmetric": False}
_RECIPE = {
    "save_stage": {
        "save_modifiers": {
            "QuantizationModifier": {"ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": _GROUP}}}
        }
    }
}


def _changed_state(expression: str) -> Edit:
    """The state with every `key: value` replaced by an expression."""
    return Edit(_STATE, "model.state_dict()", "{" + expression + " for key, value in model.state_dict().items()}")


_MUTANTS: Sequence[Mutant] = (
    bug(
        *("scales_doubled", "writer", "scales on disk are twice those in memory", "artifact.reload"),
        _changed_state("key: value * 2 if key.endswith('weight_scale') else value"),
    ),
    bug(
        *("norms_scaled", "writer", "weights of norms are scaled on their way to the disk", "artifact.reload"),
        _changed_state("key: (value * 1.05).to(value.dtype) if key.endswith('norm.weight') else value"),
    ),
    bug(
        *("codes_rolled", "writer", "packed codes are off by one row", "artifact.reload"),
        _changed_state("key: value.roll(1, 0) if key.endswith('weight_packed') else value"),
    ),
    bug(
        *("zero_points_negated", "writer", "packed zero points are complemented", "artifact.reload"),
        _changed_state("key: ~value if key.endswith('weight_zero_point') else value"),
    ),
    bug(
        *("siblings_swapped", "writer", "gate and up projections change places", "artifact.reload"),
        _changed_state("key.replace('gate', '?').replace('up_', 'gate_').replace('?_', 'up_'): value"),
    ),
    bug(
        *("one_layer_twice", "writer", "the second layer is written with the weights of the first", "artifact.reload"),
        _changed_state("key: model.state_dict()[key.replace('layers.1.', 'layers.0.')]"),
    ),
    bug(
        *("nothing_ignored", "config", "the config lists no layer that stays unquantized", "artifact.decoded"),
        Edit(_CONFIG, '"ignore": list(ignore),', '"ignore": [],'),
    ),
    bug(
        *("wrong_format", "config", "the config names another format than that of the tensors", "artifact.reload"),
        Edit(_CONFIG, '"format": scheme.compression_format,', '"format": "int-quantized",'),
    ),
    bug(
        *("tokenizer_rewritten", "writer", "tokenizer files are written anew instead of copied", "artifact.tokenizer"),
        Edit(_TOKENIZER, "shutil.copyfile(path, folder / path.name)", "(folder / path.name).write_text(path.read_text() + chr(10))"),
    ),
    bug(
        *("tokenizer_forgotten", "writer", "one kind of tokenizer file is left out", "artifact.tokenizer"),
        Edit(_TOKENIZER, 'elif path.suffix != ".py":', 'elif path.name != "tokenizer_config.json":'),
    ),
)


@functools.cache
def _base() -> Path:
    """A small Llama with a tokenizer, kept until the process ends."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp(prefix="mutants-base-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with torch.random.fork_rng():
        model = tiny.llama(hidden_size=64, tie_word_embeddings=False, dtype="bfloat16").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # all ones would hide what happens to them
            parameter.data += torch.linspace(0, 0.5, parameter.numel(), dtype=parameter.dtype)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


class _Written:
    """The checkpoint that the writer of the moment writes; made when the first check asks for it."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-written-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._error = ""

    @functools.cached_property
    def artifact(self) -> OurArtifact | None:
        """The checkpoint; None where the writer itself refused, which is being seen as well."""
        from compressor import oneshot

        folder = self._folder / "out"
        try:
            model = oneshot(_base(), recipe=_RECIPE, output_dir=folder, device="cpu").model
        except CompressorError as error:
            self._error = f"the writer refuses: {error}"
            return None
        return OurArtifact(_base(), folder, model)

    def look(self, name: str) -> str | None:
        """Run one check."""
        artifact = self.artifact
        if artifact is None:
            return self._error
        record = find_checks([name], "artifact")[0].run(artifact, CheckContext(draws=False))
        return record.summary if record.outcome is Outcome.FAIL else None


def _killers(mutant: Mutant | None) -> Sequence[Killer]:
    written = _Written()
    return [Killer(check.name, partial(written.look, check.name)) for check in find_checks(None, "artifact")]


FAMILY = Family("checkpoints", {mutant.name: mutant for mutant in _MUTANTS}, _killers)
