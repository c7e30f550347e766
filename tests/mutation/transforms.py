"""Planted bugs in transforms: variants of the reference transforms, wrong as some in the field were, against checks 31 to 36."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from harness.checks.catalogue.registry import CheckContext, find_checks
from harness.mutants.family import Family, Killer
from harness.mutants.patches import Mutant
from harness.reporting.verdict import Outcome
from tests.mutation.wrong_transforms import AlwaysSmooth, Base, FoldNorms, Rotate, Smooth, gain, norm_pairs, untie


class CentredEmbeddings(Base):
    """Mean-centres the embeddings, which only a LayerNorm forgives: 20 % at every dtype."""

    def apply(self, model: Any, batches: Sequence[Tensor]) -> None:
        """Change the model in place."""
        untie(model)
        weight = model.model.embed_tokens.weight
        weight.sub_(weight.mean(1, keepdim=True))

    def targets(self, model: Any) -> list[str]:
        """Weights that must have changed."""
        return ["model.embed_tokens.weight"]


class NormNotReset(FoldNorms):
    """Folds, and leaves the norm what it was."""

    def reset(self, norm: Any) -> None:
        """Leave the norm with nothing to multiply."""
        del norm


class ForgetsTheOne(FoldNorms):
    """Folds the weight of a gemma norm without the one that is added to it."""

    def factor(self, norm: Any) -> Tensor:
        """What is folded."""
        weight: Tensor = norm.weight
        return weight

    def reset(self, norm: Any) -> None:
        """Leave the norm with nothing to multiply."""
        norm.weight.fill_(1)


class WrongNormOfGemma(FoldNorms):
    """Takes gemma2's post_attention_layernorm for the norm before the MLP."""

    def pairs(self, model: Any) -> Iterable[tuple[Any, list[nn.Linear]]]:
        """Norms, and who reads them."""
        for layer in model.model.layers:
            yield layer.input_layernorm, [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
            yield layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]
        yield model.model.norm, [model.lm_head]


class InBfloat16(FoldNorms):
    """Computes in bfloat16 whatever the model has."""

    def apply(self, model: Any, batches: Sequence[Tensor]) -> None:
        """Change the model in place."""
        untie(model)
        for norm, linears in norm_pairs(model):
            for linear in linears:
                linear.weight.copy_((linear.weight.bfloat16() * gain(norm).bfloat16()).to(linear.weight.dtype))
            self.reset(norm)


class InFloat32(FoldNorms):
    """Computes in float32: only the rung of float64 sees it."""

    def apply(self, model: Any, batches: Sequence[Tensor]) -> None:
        """Change the model in place."""
        untie(model)
        for norm, linears in norm_pairs(model):
            for linear in linears:
                linear.weight.copy_(
                    (linear.weight.type("torch.FloatTensor") * gain(norm).type("torch.FloatTensor")).to(linear.weight.dtype)
                )
            self.reset(norm)


class KeepsTheTie(FoldNorms):
    """Folds the last norm into a head that is the embedding, too."""

    def apply(self, model: Any, batches: Sequence[Tensor]) -> None:
        """Change the model in place."""
        for norm, linears in norm_pairs(model):
            for linear in linears:
                linear.weight.mul_(gain(norm))
            self.reset(norm)


class UntiesInMemoryOnly(FoldNorms):
    """Unties without saying so in the config: what is loaded again is tied again."""

    def apply(self, model: Any, batches: Sequence[Tensor]) -> None:
        """Change the model in place."""
        if model.lm_head.weight is model.model.embed_tokens.weight:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        tie, model.config.tie_word_embeddings = model.config.tie_word_embeddings, False
        super().apply(model, batches)
        model.config.tie_word_embeddings = tie


class NotNormalized(Rotate):
    """A Hadamard matrix whose scale is a little off."""

    def rotation(self, n: int) -> Tensor:
        """A Hadamard matrix, [n, n] float64."""
        return super().rotation(n) * 1.0001


class DoesNothing(FoldNorms):
    """Matches no module, and says nothing."""

    def apply(self, model: Any, batches: Sequence[Tensor]) -> None:
        """Change the model in place."""
        del model, batches


class SkipsOne(FoldNorms):
    """Leaves out the last pair."""

    def pairs(self, model: Any) -> Iterable[tuple[Any, list[nn.Linear]]]:
        """Norms, and who reads them."""
        return list(norm_pairs(model))[:-1]


class NoTargets(FoldNorms):
    """Claims nothing, so that nothing can be found missing."""

    def targets(self, model: Any) -> list[str]:
        """Weights that must have changed."""
        return []


class ScaleOnOneSide(AlwaysSmooth):
    """Scales the weights and forgets the norm."""

    def place(self, norm: Any, linears: list[nn.Linear], scale: Tensor) -> None:
        """Scale weights up and the norm down."""
        for linear in linears:
            linear.weight.mul_(scale)


class TakesTheWorst(Smooth):
    """Searches for the largest loss."""

    def best(self, x: Tensor, linears: list[nn.Linear]) -> Tensor:
        """The scale with the least loss."""
        return max((x.abs().mean(0).clamp(min=1e-5) ** power for power in (0.0, -1.5, 3.0)), key=lambda scale: self.loss(x, linears, scale))


@dataclass(frozen=True)
class TransformMutant(Mutant):
    """A transform that is wrong by itself: nothing has to be patched.

    Attributes:
        make: the wrong transform.
    """

    make: type[Base] = Base

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Leave everything as it is: the wrong transform is the subject.

        Yields:
            Nothing.
        """
        yield


def _bug(make: type[Base], killer: str) -> TransformMutant:
    wrong = (make.__doc__ or "").strip().rstrip(".")
    return TransformMutant(make.__name__, "transform", wrong[0].lower() + wrong[1:], (), f"transform.{killer}", make)


_MUTANTS: Sequence[TransformMutant] = (
    _bug(CentredEmbeddings, "float_output"),
    _bug(NormNotReset, "float_output"),
    _bug(ForgetsTheOne, "every_architecture"),
    _bug(WrongNormOfGemma, "every_architecture"),
    _bug(InBfloat16, "float_output"),
    _bug(InFloat32, "float_output"),
    _bug(KeepsTheTie, "tied_weights"),
    _bug(UntiesInMemoryOnly, "tied_weights"),
    _bug(NotNormalized, "float_output"),
    _bug(DoesNothing, "not_vacuous"),
    _bug(SkipsOne, "not_vacuous"),
    _bug(NoTargets, "not_vacuous"),
    _bug(ScaleOnOneSide, "float_output"),
    _bug(TakesTheWorst, "search_pays"),
)
_SOUND: Sequence[type[Base]] = (FoldNorms, Rotate, AlwaysSmooth)


def _look(name: str, kinds: Sequence[type[Base]]) -> str | None:
    check = find_checks([name], "transform")[0]
    for kind in kinds:
        record = check.run(kind(), CheckContext(draws=False))
        if record.outcome is Outcome.FAIL:
            return f"{kind.__name__}: {record.summary}"
    return None


def _killers(mutant: Mutant | None) -> Sequence[Killer]:
    kinds = (mutant.make,) if isinstance(mutant, TransformMutant) else _SOUND
    return [Killer(check.name, partial(_look, check.name, kinds)) for check in find_checks(None, "transform")]


FAMILY = Family("transforms", {mutant.name: mutant for mutant in _MUTANTS}, _killers)
