"""Padding and masked tokens do not matter (check 41): Hessians agree to 1e-6 relative with and without them, in every pipeline.

The model computes in float64, so that what differs is what statistics count, not how a padded forward rounds.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import RoFormerConfig, RoFormerForMaskedLM

from compressor import AWQModifier, Modifier, QuantizationModifier, SmoothQuantModifier, WandaPruningModifier, oneshot
from compressor.algorithms.hessian import Hessian
from compressor.data import CalibrationData, load_dataset_source
from compressor.errors import CalibrationError
from compressor.lifecycle import Session, State
from compressor.modifiers.gptq import GPTQModifier, Solved
from compressor.modifiers.schemes import input_statistics
from compressor.nn import QuantizedLayer
from compressor.pipelines import basic, run_pipeline, sequential
from compressor.progress import SilentProgress
from tests import tiny

LENGTHS = (9, 4, 12, 7, 12)
PAD = 63  # a token with an embedding of its own, which would leave traces
BOUND = 1e-6


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 60, (length,), generator=generator) for length in LENGTHS]


def padded(side: str) -> CalibrationData:
    """One batch of all rows, padded on one side, as a loader of somebody else's would give it."""
    width = max(LENGTHS)
    ids, mask = torch.full((len(LENGTHS), width), PAD), torch.zeros(len(LENGTHS), width, dtype=torch.long)
    for index, row in enumerate(rows()):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[index, place], mask[index, place] = row, 1
    # Positions as in the unpadded rows: rotary attention sees differences only, but let nothing depend on that.
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return load_dataset_source(DataLoader([{"input_ids": ids, "attention_mask": mask, "position_ids": positions}], batch_size=None))  # type: ignore[arg-type]


def hessians(data: CalibrationData, pipeline: str) -> dict[str, Tensor]:
    """Run GPTQ and note each Hessian at the moment when it is used."""

    model = tiny.llama(num_attention_heads=2, intermediate_size=32, num_key_value_heads=1).double()
    found: dict[str, Tensor] = {}

    class Noting(GPTQModifier):
        def _solve_stack(self, state: State, names: list[str], hessian_CC: Tensor, seen: Hessian, shift_CC: Tensor | None) -> list[Solved]:
            found["+".join(names)] = hessian_CC.double().clone()
            if pipeline == "basic":  # what is learned from the float flow depends on nothing that was compressed
                return super()._solve_stack(state, names, hessian_CC, seen, shift_CC)
            return [self._round(name, "noted", "not solved") for name in names]

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups: Any = {"all": {"targets": ["Linear"], "weights": weights}}
    modifier = Noting(config_groups=groups, ignore=["lm_head"], fallback_budget=99)
    with Session(State(model), [modifier]) as session:
        session.initialize()
        run_pipeline(pipeline, session, data, progress=SilentProgress())
        session.finalize()
    return found


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys() and len(found) >= 8
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
@pytest.mark.parametrize("kind", ["right", "left", "ours"])
def test_hessians_are_the_same_with_and_without_padding(pipeline: str, kind: str) -> None:
    data = load_dataset_source(rows(), batch_size=5) if kind == "ours" else padded(kind)
    assert data.num_tokens == sum(LENGTHS) and data.token_masks[0] is not None
    assert distance(hessians(data, pipeline), hessians(load_dataset_source(rows(), batch_size=1), pipeline)) <= BOUND


def masks() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 2, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_masked_tokens_are_read_but_not_counted(batch_size: int | None) -> None:
    """Against a naive reference: plain forwards of whole rows, sums over the tokens that count."""

    model = tiny.llama(num_attention_heads=2, intermediate_size=32, num_key_value_heads=1).double().eval()
    sums: dict[str, Tensor] = {}
    num_tokens = sum(int(mask.sum()) for mask in masks())
    for row, mask in zip(rows(), masks(), strict=True):
        with contextlib.ExitStack() as hooks:
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear) and name != "lm_head":

                    def add(_: nn.Module, args: tuple[Tensor], name: str = name, mask: Tensor = mask) -> None:
                        x = args[0][0][mask.bool()]
                        sums[name] = sums.get(name, torch.tensor(0.0)) + 2 * x.t() @ x / num_tokens

                    hooks.callback(module.register_forward_pre_hook(add).remove)
            with torch.no_grad():
                model(input_ids=row[None])
    data = load_dataset_source(
        [{"input_ids": row, "loss_mask": mask} for row, mask in zip(rows(), masks(), strict=True)], batch_size=batch_size
    )
    assert data.num_tokens == num_tokens
    found = hessians(data, "basic")
    assert distance(found, {names: sums[names.split("+")[0]] for names in found}) <= BOUND


PLANTED = ["masks are dropped", "masks of another batch", "padding on the wrong side", "padding counts as tokens"]


@pytest.mark.parametrize("bug", PLANTED)
def test_the_check_sees_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_dataset_source(rows(), batch_size=1)
    expected = hessians(plain, "sequential")
    if bug == "masks are dropped":
        monkeypatch.setattr(sequential, "set_token_mask", lambda *args: None)
        monkeypatch.setattr(basic, "set_token_mask", lambda *args: None)
    elif bug == "masks of another batch":
        plain_set = sequential.set_token_mask
        monkeypatch.setattr(sequential, "set_token_mask", lambda state, data, index: plain_set(state, data, (index + 1) % 2))
    elif bug == "padding on the wrong side":
        plain_sequences = input_statistics.token_sequences
        monkeypatch.setattr(input_statistics, "token_sequences", lambda x, mask, name: plain_sequences(x, mask.flip(-1), name))
    elif bug == "padding counts as tokens":
        plain_add = Hessian.add

        def add(self: Hessian, x: Tensor, part: int) -> None:
            plain_add(self, x, part)
            self.num_tokens += 1

        monkeypatch.setattr(Hessian, "add", add)
    data = load_dataset_source(rows(), batch_size=3)
    if bug == "masks of another batch":
        with pytest.raises(CalibrationError, match=r"does not line up with a batch"):
            hessians(data, "sequential")
        return
    found = hessians(data, "sequential")
    if bug == "padding counts as tokens":  # the count is wrong for both splits: only the reference without padding is right
        monkeypatch.undo()
        expected = hessians(plain, "sequential")
    assert distance(found, expected) > 1e3 * BOUND


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_a_decoder_of_the_encoders_shape_is_not_masked_by_the_encoders_padding(pipeline: str) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartForConditionalGeneration(BartConfig(vocab_size=64, max_position_embeddings=32, **sizes, **heads)).eval()

    def compress(decoder_length: int, mask: Tensor) -> None:
        ids = torch.randint(4, 60, (2, 8), generator=torch.Generator().manual_seed(1))
        batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids.repeat(1, 2)[:, :decoder_length]}
        data = load_dataset_source(DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
        modifier = GPTQModifier(scheme="W8A8", targets=["re:.*decoder.*fc1"])
        with Session(State(model), [modifier]) as session:
            session.initialize()
            run_pipeline(pipeline, session, data, progress=SilentProgress())
            session.abort()

    padded_mask = torch.ones(2, 8, dtype=torch.long)
    padded_mask[1, 5:] = 0
    with pytest.raises(CalibrationError, match="decoder_input_ids has the shape"):
        compress(8, padded_mask)
    compress(8, torch.ones(2, 8, dtype=torch.long))


class Reordering(nn.Module):
    """Two layers that get the tokens in an order of their own."""

    def __init__(self, order: Any, back: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.order, self.back = nn.Embedding(64, 16), order, back
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.order(self.embed(input_ids))
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.back(hidden, input_ids)  # type: ignore[no-any-return]


ORDERS = {
    "as they come": (lambda x: x, lambda x, ids: x),
    "flat": (lambda x: x.flatten(0, 1), lambda x, ids: x.unflatten(0, ids.shape)),
    "backwards": (lambda x: x.flip(1), lambda x, ids: x.flip(1)),
    "rolled": (lambda x: x.roll(1, 1), lambda x, ids: x.roll(-1, 1)),
    "rows exchanged": (lambda x: x.flip(0), lambda x, ids: x.flip(0)),
    "by time": (lambda x: x.transpose(0, 1).flatten(0, 1), lambda x, ids: x.unflatten(0, ids.t().shape).transpose(0, 1)),
    "something else": (lambda x: x * 0 + torch.arange(16.0), lambda x, ids: x),
}
FITTING = ("as they come", "flat")


def quantize(model: nn.Module, data: CalibrationData, pipeline: str, target: str = "Linear") -> list[str]:
    with Session(State(model), [GPTQModifier(scheme="W8A8", targets=[target])]) as session:
        session.initialize()
        run_pipeline(pipeline, session, data, progress=SilentProgress())
        session.finalize()
        return list(session.state.report.notes)


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_mask_is_not_laid_on_rows_that_are_not_the_tokens(order: str, pipeline: str) -> None:
    batch = {name: one for name, one in padded("right").batches[0].items() if name != "position_ids"}  # type: ignore[union-attr]
    data = load_dataset_source(DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    model = Reordering(*ORDERS[order])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if order in FITTING:
        quantize(model, data, pipeline)
        return
    with pytest.raises(CalibrationError, match=r"layers\.0: .*give batches without padding: batch_size=1"):
        quantize(model, data, pipeline)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class Normed(nn.Module):
    """A norm and two layers that get the tokens backwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(64, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        given: Tensor = self.down(self.up(self.norm(self.embed(input_ids).flip(1))).tanh()).flip(1)
        return given


PAIR = [[["up"], "norm"]]
IMPORTANCE = {"all": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "channel", "observer": "imatrix_mse"}}}
STATIC = {
    "all": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False},
    }
}
OWN_FORWARDS: dict[str, list[Modifier]] = {
    "Wanda": [WandaPruningModifier(sparsity=0.5)],
    "importance": [QuantizationModifier(config_groups=IMPORTANCE)],  # type: ignore[arg-type]
    "SmoothQuant": [SmoothQuantModifier(mappings=PAIR), QuantizationModifier(scheme="W8A8")],  # type: ignore[arg-type]
    "AWQ": [AWQModifier(mappings=PAIR), QuantizationModifier(scheme="W8A8")],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", OWN_FORWARDS)
def test_modifiers_with_forwards_of_their_own_lay_no_mask_on_other_rows(name: str) -> None:
    batch = {key: one for key, one in padded("right").batches[0].items() if key != "position_ids"}  # type: ignore[union-attr]
    with pytest.raises(CalibrationError, match="not in the order of the"):
        oneshot(Normed(), recipe=OWN_FORWARDS[name], dataset=DataLoader([batch], batch_size=None))  # type: ignore[arg-type]


def test_rows_that_hardly_move_with_the_tokens_are_not_taken_for_padding() -> None:
    """Attention of small weights is uniform: a padded row stands still under other padding, and a real one moves by a hair."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for number in range(6):
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[1, 4 + number % 5 :] = 0
        batches.append({"input_ids": torch.randint(3, 64, (2, 12), generator=generator) * mask, "attention_mask": mask})
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "embedding_size": 16}
    torch.manual_seed(1)
    model = RoFormerForMaskedLM(RoFormerConfig(vocab_size=64, max_position_embeddings=64, **sizes)).eval()
    recipe = QuantizationModifier(config_groups=STATIC, ignore=["cls.predictions.decoder"])  # type: ignore[arg-type]
    result = oneshot(model, recipe=recipe, dataset=DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert len(result.report.modules) > 10


@pytest.mark.parametrize("decoder_length", [6, 9])
def test_what_is_said_of_a_decoder_behind_a_padded_encoder_is_what_helps(decoder_length: int) -> None:
    model = tiny.t5(num_layers=1)
    recipe, ids = "quant_stage: {quant_modifiers: {GPTQModifier: {scheme: W8A8, ignore: [lm_head]}}}", torch.randint(3, 60, (1, 9))
    batch = {"input_ids": ids, "attention_mask": (torch.arange(9) < 7).long()[None], "decoder_input_ids": ids[:, :decoder_length]}
    with pytest.raises(CalibrationError, match="those of a DataLoader you cut to their own length"):
        oneshot(model, recipe=recipe, dataset=DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    cut = {**batch, "input_ids": ids[:, :7], "attention_mask": torch.ones(1, 7, dtype=torch.long)}
    oneshot(model, recipe=recipe, dataset=DataLoader([cut], batch_size=None))  # type: ignore[arg-type]
    assert isinstance(model.decoder.block[0].layer[1].EncDecAttention.q, QuantizedLayer)


@pytest.mark.parametrize("padded_too", [False, True])
@pytest.mark.parametrize("decoder_length", [6, 9])
def test_a_loss_mask_beside_a_decoder_is_named_and_leaving_it_out_helps(decoder_length: int, padded_too: bool) -> None:
    model = tiny.t5(num_layers=1)
    recipe, ids = "quant_stage: {quant_modifiers: {GPTQModifier: {scheme: W8A8, ignore: [lm_head]}}}", torch.randint(3, 60, (1, 9))
    batch = {"input_ids": ids, "decoder_input_ids": ids[:, :decoder_length]}
    masks = {"loss_mask": (torch.arange(9) > 3).long()[None]}
    if padded_too:
        masks["attention_mask"] = (torch.arange(9) < 7).long()[None]
    with pytest.raises(CalibrationError, match="leave out the loss_mask") as raised:
        oneshot(model, recipe=recipe, dataset=DataLoader([{**batch, **masks}], batch_size=None))  # type: ignore[arg-type]
    assert padded_too or decoder_length == 6 or "padding" not in str(raised.value)
    oneshot(model, recipe=recipe, dataset=DataLoader([batch], batch_size=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("as_tuple", [False, True])
def test_a_mask_of_another_name_is_said_not_to_be_read(as_tuple: bool) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(64, 16), nn.Linear(16, 16)

        def forward(self, input_ids: Tensor, key_padding_mask: Tensor) -> Tensor:
            hidden: Tensor = self.layer(self.embed(input_ids))
            return hidden * ~key_padding_mask[..., None]

    ids, mask = torch.arange(12).view(2, 6), torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
    batch: Any = (ids, mask) if as_tuple else {"input_ids": ids, "key_padding_mask": mask}
    notes = quantize(Masked(), load_dataset_source(DataLoader([batch], batch_size=None)), "sequential")
    name = "position 1" if as_tuple else "key_padding_mask"
    assert any(note.startswith(f"{name} of the batches is not read, and") for note in notes)
    rows = [{"input_ids": ids[0], "assistant_masks": [0] * 3 + [1] * 3}]
    notes = quantize(tiny.llama(), load_dataset_source(rows), "basic")
    assert any(note.startswith("assistant_masks of the batches is not read, and") for note in notes)


@pytest.mark.parametrize("is_padded", [False, True])
def test_the_mask_of_a_decoder_is_said_not_to_be_read_whatever_its_length(is_padded: bool) -> None:
    ids, length = torch.arange(24).view(2, 12), 12 - 3 * is_padded
    mask, decoder_mask = torch.ones(2, 12, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
    mask[1, length:] = 0
    decoder_mask[1, 3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :5], "decoder_attention_mask": decoder_mask}
    model = tiny.t5(vocab_size=64)
    layer = "encoder.block.0.layer.0.SelfAttention.q"  # those of the decoder do not line up with a padded encoder
    notes = quantize(model, load_dataset_source(DataLoader([batch], batch_size=None)), "basic", layer)  # type: ignore[arg-type]
    (note,) = (note for note in notes if note.startswith("decoder_attention_mask of the batches is not read, and"))
    assert "no loss_mask speaks of a decoder's tokens: give batches without padding" in note
    labels = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, :5].where(decoder_mask == 1, -100)}
    notes = quantize(tiny.t5(vocab_size=64), load_dataset_source(DataLoader([labels], batch_size=None)), "basic", layer)  # type: ignore[arg-type]
    assert any(note.startswith("-100 among the labels of the batches is not read, and") for note in notes)


@pytest.mark.parametrize("seed", range(6))
def test_a_plain_model_is_never_taken_for_one_that_sorts_its_tokens(seed: int) -> None:
    """Attention of random weights is nearly uniform: padded rows hardly move with the padding, and real ones by little with the tokens."""

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 20, (24,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(1, 64, (length,), generator=generator).tolist()} for length in lengths]
    groups = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}}
    result = oneshot(
        tiny.llama(seed=seed, intermediate_size=48),
        recipe=GPTQModifier(ignore=["lm_head"], config_groups=groups, mode="fast"),
        dataset=rows,
        batch_size=24,
    )
    assert {record.num_tokens for record in result.report.modules.values()} == {sum(lengths)}


@pytest.mark.parametrize(
    ("begins_again", "mask", "use_cache"), [(True, False, True), (True, True, True), (True, False, False), (False, False, True)]
)
def test_packed_sequences_that_a_cache_would_join_are_told(begins_again: bool, mask: bool, use_cache: bool) -> None:
    model = tiny.llama()
    model.config.use_cache = use_cache
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3] if begins_again else range(7))[None]
    batch = {"input_ids": torch.arange(7)[None], "position_ids": positions} | ({"attention_mask": torch.ones(1, 7).long()} if mask else {})
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16, "strategy": "group"}}
    recipe = GPTQModifier(config_groups={"g": group}, ignore=["lm_head"])
    notes = oneshot(model, recipe=recipe, dataset=DataLoader([batch], batch_size=None)).report.notes  # type: ignore[arg-type]
    assert any("positions begin again" in note for note in notes) is (begins_again and not mask and use_cache)


def test_how_a_model_is_built_is_learned_from_the_fullest_batch() -> None:
    full = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in rows()]
    empty = {"input_ids": torch.zeros(1, 9, dtype=torch.long), "attention_mask": torch.zeros(1, 9, dtype=torch.long)}
    moved = []
    for batches in ([empty, *full], [*full, empty]):
        recipe = [SmoothQuantModifier(), QuantizationModifier(scheme="W8A8", ignore=["lm_head"])]
        result = oneshot(tiny.llama(), recipe=recipe, dataset=DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        moved.append(result.report.transforms)
    assert moved[0] == moved[1] and len(moved[0]) > 0
