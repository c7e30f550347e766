"""Our pruning algorithms, and the modifiers that move scales, turn hidden states or take experts out, as subjects of the catalogue."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from compressor.algorithms.pruning.magnitude import Pattern, pruned_weights
from compressor.algorithms.pruning.sparsegpt import prune_sparsegpt
from compressor.algorithms.pruning.wanda import prune_wanda
from compressor.algorithms.rotations import make_rotation
from compressor.algorithms.rtn import round_to_nearest
from compressor.data import CalibrationData
from compressor.data.collate import Batch
from compressor.lifecycle import EventType, Session, State
from compressor.lifecycle.modifier import Modifier
from compressor.model.checkpoints.load import load_compressed
from compressor.model.checkpoints.save import save_checkpoint
from compressor.model.experts.unfuse import unfused_experts
from compressor.model.saving import attach_save
from compressor.modifiers.pruning.reap import REAPPruningModifier
from compressor.modifiers.transforms.awq import AWQModifier
from compressor.modifiers.transforms.moving_scales import ScaleMovingModifier
from compressor.modifiers.transforms.quip import QuIPModifier
from compressor.modifiers.transforms.rotating import RotatingModifier
from compressor.modifiers.transforms.smoothing import LogarithmicEqualizationModifier, SmoothQuantModifier
from compressor.modifiers.transforms.spinquant import SpinQuantModifier
from compressor.numerics.observers import weight_qparams
from compressor.numerics.quantize import dequantize, fake_quantize
from compressor.numerics.scheme import QuantizationArgs, QuantizationScheme
from harness.checks.protocols import Pruner

_ROUNDED = QuantizationArgs(num_bits=4, strategy="channel", symmetric=False)
_INT4 = QuantizationArgs(num_bits=4, strategy="channel")
_QKV, _MLP = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"), ("gate_proj", "up_proj", "gate_up_proj", "fc1", "dense_h_to_4h")
_MLP_ENDS = ("down_proj", "fc2")


def rounded(weight: Tensor) -> Tensor:
    """Round to 4 bits with zero points, one scale a row.

    Args:
        weight: [R, C].

    Returns:
        The values.
    """
    qparams = weight_qparams(weight, _ROUNDED)
    return dequantize(round_to_nearest(weight, qparams, _ROUNDED).codes_RC, qparams, _ROUNDED)


def pruners() -> list[Pruner]:
    """Return our pruners, with and without a pattern.

    Returns:
        Subjects.
    """
    made = []
    for pattern in (None, (2, 4), (1, 4), (5, 8)):
        form = None if pattern is None else Pattern(*pattern)
        sparsity = 0.37 if form is None else form.sparsity

        def magnitude(weight: Tensor, hessian: Tensor, form: Pattern | None = form, sparsity: float = sparsity) -> Tensor:
            del hessian
            (gone,) = pruned_weights([weight], sparsity, form)
            return weight.masked_fill(gone, 0.0)

        def wanda(weight: Tensor, hessian: Tensor, form: Pattern | None = form, sparsity: float = sparsity) -> Tensor:
            return weight.masked_fill(prune_wanda(weight, hessian.diagonal(), sparsity, form), 0.0)

        def sparsegpt(weight: Tensor, hessian: Tensor, form: Pattern | None = form, sparsity: float = sparsity) -> Tensor:
            return prune_sparsegpt([weight], hessian, sparsity, form)[0].weight_RC

        def classical_sparsegpt(weight: Tensor, hessian: Tensor, form: Pattern | None = form, sparsity: float = sparsity) -> Tensor:
            return prune_sparsegpt([weight], hessian, sparsity, form, refining_steps=0)[0].weight_RC

        whole = "tensor" if pattern is None else "row"
        kinds: list[tuple[Callable[[Tensor, Tensor], Tensor], str, bool]] = [
            (magnitude, whole, False),
            (wanda, "row", False),
            (sparsegpt, whole, True),
            (classical_sparsegpt, whole, True),
        ]
        for function, _, _ in kinds:
            function.__name__ += "" if pattern is None else f"-{pattern[0]}of{pattern[1]}"
        made += [
            Pruner(function, sparsity, pattern, scope, second, rounded, frozenset({"reads_hessian"} if function is wanda else ()))
            for function, scope, second in kinds
        ]
    return made


@dataclass(frozen=True)
class OurTransform:
    """A modifier that moves scales or turns hidden states.

    Attributes:
        modifier: its class.
        settings: of it.
        readers: last parts of the names of layers that read a norm and must come out changed.
        fake_quantize: what a quantizer behind it leaves of a weight, where it searches.
        architectures: of `harness trace-audit`.
        variant: what tells it from others of its class, for reports.
    """

    modifier: type[ScaleMovingModifier | RotatingModifier]
    settings: Mapping[str, Any]
    readers: Sequence[str] = (*_QKV, *_MLP)
    fake_quantize: Callable[[Tensor], Tensor] | None = None
    architectures: Sequence[str] = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "opt", "gpt_neox")
    variant: str = ""
    kind: ClassVar[str] = "transform"

    @property
    def tags(self) -> frozenset[str]:
        """What it promises."""
        turned = set(self.settings.get("rotations", ()))
        online = {"online"} if {"R4", "v", "u"} & turned else set()
        return frozenset({"invariant_fp"} | online | ({"incoherent"} if {"v", "u"} <= turned else set()))

    @property
    def name(self) -> str:
        """For reports."""
        return "-".join([self.modifier.__name__.removesuffix("Modifier"), *([self.variant] if self.variant else [])])

    def apply(self, model: nn.Module, batches: Sequence[Tensor]) -> None:
        """Change the model in place."""
        modifier: Modifier = self.modifier(**self.settings)
        rows, tokens = sum(len(ids) for ids in batches), sum(ids.numel() for ids in batches)
        state = State(model, data=CalibrationData([{"input_ids": ids} for ids in batches], [None] * len(batches), "", rows, tokens))
        session = Session(state, [modifier])
        session.initialize()
        scheme = QuantizationScheme(targets=["Linear"], weights=_INT4)  # as a quantizer behind it would have it
        state.schemes.update({name: scheme for name, part in model.named_modules() if isinstance(part, nn.Linear)})
        session.send(EventType.CALIBRATION_START)
        session.send(EventType.CALIBRATION_END)
        session.finalize()

    def targets(self, model: nn.Module) -> Sequence[str]:
        """Weights that must have changed: those that read a norm."""
        return [name for name, _ in model.named_parameters() if name.removesuffix(".weight").rpartition(".")[2] in self.readers]

    def reload(self, model: nn.Module) -> nn.Module:
        """Read what is written with our own loader: that of transformers passes over `transform_config`."""
        with tempfile.TemporaryDirectory() as folder:
            save_checkpoint(model, folder, schemes={}, record=None)
            return load_compressed(folder, device="cpu", model_class=type(model))

    def rotations(self, model: nn.Module) -> Mapping[str, Tensor]:
        """The matrix that turns all hidden states, of modifiers that have one."""
        if not issubclass(self.modifier, SpinQuantModifier) or "R1" not in self.settings.get("rotations", ["R1"]):
            return {}
        config: Any = model.config
        kind = str(self.settings.get("transform_type", "hadamard"))
        size = self.settings.get("transform_block_size") or config.get_text_config().hidden_size
        return {f"R1, keeps_mean={keeps}": make_rotation(kind, size, keeps_mean=keeps).matrix() for keeps in (False, True)}


def transforms() -> list[OurTransform]:
    """Return our modifiers that move scales or turn hidden states.

    Returns:
        Subjects.
    """

    def int4(weight: Tensor) -> Tensor:
        return fake_quantize(weight, weight_qparams(weight, _INT4), _INT4)

    whole = {"transform_type": "random-matrix"}
    drawn = {**whole, "randomize": True}
    all_names = (*_QKV, *_MLP, "c_attn", "c_fc")
    with_values = ("llama", "mistral", "qwen2", "qwen3", "opt")
    with_basis = (*with_values, "gemma", "gpt2", "gpt_neox", "phi", "phi3", "falcon", "cohere")
    # Of norms only, so that what a layer reads is all that changes in it, the search can be judged; on other architectures no scaling is
    # best for some layer.
    return [
        OurTransform(SmoothQuantModifier, {"smoothing_strength": 0.8}),
        OurTransform(LogarithmicEqualizationModifier, {}),
        OurTransform(AWQModifier, {"ignore": ["Linear"]}, _MLP, int4, ("llama", "mistral", "qwen2", "opt", "gpt_neox"), "norms"),
        OurTransform(AWQModifier, {}, _MLP, None, ("llama", "mistral", "qwen2", "opt")),
        OurTransform(SpinQuantModifier, {}, architectures=with_values),
        OurTransform(SpinQuantModifier, drawn, architectures=with_values, variant="random"),
        OurTransform(
            SpinQuantModifier, {"rotations": ["R1"], "transform_block_size": 16}, all_names, architectures=with_basis, variant="R1"
        ),
        OurTransform(SpinQuantModifier, {"rotations": ["R4"], **whole}, _MLP_ENDS, architectures=with_values, variant="R4"),
        OurTransform(QuIPModifier, {"rotations": ["v", "u"], **whole}, (*_QKV, *_MLP, *_MLP_ENDS, "o_proj"), architectures=with_values),
    ]


@dataclass(frozen=True)
class OurExpertPruner:
    """REAPPruningModifier.

    Attributes:
        sparsity: its setting.
        refit: the same.
        architectures: of `harness trace-audit`.
    """

    sparsity: float = 0.5
    refit: bool = True
    architectures: Sequence[str] = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe", "glm4_moe", "granitemoe", "ernie4_5_moe")
    kind: ClassVar[str] = "expert_pruner"

    @property
    def tags(self) -> frozenset[str]:
        """What it promises."""
        return frozenset({"router_weighted", "refits"} if self.refit else {"router_weighted"})

    @property
    def name(self) -> str:
        """For reports."""
        return f"REAP-{self.sparsity:g}" + ("" if self.refit else "-unmoved")

    def prune(self, model: nn.Module, input_ids: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Sequence[Sequence[int]]:
        """Change the model in place; return the numbers of the experts that stay, by layer."""
        batches: list[Batch] = [
            {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask.long()}
            for ids, mask in zip(input_ids, masks, strict=True)
        ]
        rows, tokens = sum(len(ids) for ids in input_ids), sum(ids.numel() for ids in input_ids)
        state = State(model, data=CalibrationData(batches, list(masks), "", rows, tokens))
        with unfused_experts(model, hold=True), Session(state, [REAPPruningModifier(sparsity=self.sparsity, refit=self.refit)]) as session:
            session.initialize()
            session.send(EventType.CALIBRATION_START)
            session.send(EventType.CALIBRATION_END)
            session.finalize()
        attach_save(model, None)
        return [layer["kept"] for layer in state.report.transforms[0]["layers"]]
