"""Samples become blocks of one length, no token twice or lost but the named rest; the order of batches follows from seed and step alone"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from compressor.data import BlockOrder, load_blocks
from compressor.data.blocks import IGNORED
from compressor.errors import DatasetError


class Letters:
    """A tokenizer: a letter is its place in the alphabet; 0 ends a text."""

    eos_token_id = 0

    def __call__(self, text, truncation, max_length, add_special_tokens):
        return {"input_ids": [ord(letter) - 96 for letter in text.replace(" ", "")][:max_length]}


def rows(count, length=8):
    return torch.arange(count * length).view(count, length)


def test_texts_are_joined_with_an_end_each_and_cut():
    blocks = load_blocks(["abc", " ", "de", "fghij"], tokenizer=Letters(), max_seq_length=4)
    assert blocks.input_ids.tolist() == [[1, 2, 3, 0], [4, 5, 0, 6], [7, 8, 9, 10]]
    assert torch.equal(blocks.labels, blocks.input_ids)
    assert (blocks.num_samples, blocks.num_left_over) == (3, 1)


def test_token_rows_are_joined_as_they_are():
    blocks = load_blocks(rows(3), max_seq_length=5)
    assert blocks.input_ids.flatten().tolist() == list(range(20)) and blocks.num_left_over == 4
    assert load_blocks(rows(3), max_seq_length=8).input_ids.tolist() == rows(3).tolist()


def test_labels_that_are_the_tokens_say_nothing_new():
    row = {"input_ids": [0, 1, 2, 3], "attention_mask": [0, 1, 1, 1], "labels": [-100, 1, 2, 3]}
    assert load_blocks([row], max_seq_length=3).input_ids.tolist() == [[1, 2, 3]]


def test_masked_tokens_are_read_but_are_no_targets():
    data = [{"input_ids": [1, 2, 3, 4], "loss_mask": [1, 0, 1, 1]}, {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 0, 0]}]
    blocks = load_blocks(data, max_seq_length=4)
    assert blocks.input_ids.tolist() == [[1, 2, 3, 4]], "a block without a target is left out"
    assert (
        blocks.labels.tolist() == [[1, IGNORED, 3, 4]]
        and blocks.num_targets.tolist() == [2]
        and blocks.num_left_over == 4
        and blocks.num_without_target == 1
    )
    with pytest.raises(DatasetError, match="leaves no token to predict in 1 blocks"):
        load_blocks(data[1:], max_seq_length=4)


def test_the_hash_names_tokens_and_masks():
    plain = load_blocks(rows(2), max_seq_length=8).sha256
    masked = load_blocks([{"input_ids": rows(2)[0].tolist(), "loss_mask": [1] * 7 + [0]}, rows(2)[1].tolist()], max_seq_length=8).sha256
    assert len({plain, masked, load_blocks(rows(2), max_seq_length=4).sha256, load_blocks(rows(2).flip(0), max_seq_length=8).sha256}) == 4


@pytest.mark.parametrize(
    ("data", "length", "match"),
    [
        (rows(2), 17, "16 tokens in 2 samples do not fill one block of 17"),
        (rows(2), 1, "a block of 1 token has none to predict"),
        (rows(2), 33, "33 is more than the model takes; give at most 32"),
        (rows(2), 0, "0 is not positive"),
        ([], 4, "0 tokens in 0 samples"),
        (DataLoader([1]), 4, "a DataLoader decides its own batches.* give a list of its rows instead"),
        ({"input_ids": rows(2)}, 4, r"a list of texts, token tensors or mappings$"),
        (["abc"], 2, "text needs a tokenizer"),
        ([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}], 2, "the column 'labels' .*a loss_mask says which tokens are learnt"),
    ],
)
def test_data_that_cannot_be_used_is_refused(data, length, match):
    with pytest.raises(DatasetError, match=match):
        load_blocks(data, max_seq_length=length, max_positions=32)


def test_each_epoch_takes_every_block_once_in_an_order_of_its_own():
    order = BlockOrder(load_blocks(rows(12), max_seq_length=8), batch_size=3, accumulate=2, seed=5)
    assert order.steps_per_epoch == 2

    def epoch(number, of=order):
        return [int(row[0]) // 8 for step in (2 * number, 2 * number + 1) for micro in of(step) for row in micro["input_ids"]]

    assert sorted(epoch(0)) == sorted(epoch(1)) == list(range(12))
    assert epoch(0) != epoch(1) and epoch(0) != list(range(12))
    again = BlockOrder(load_blocks(rows(12), max_seq_length=8), batch_size=3, accumulate=2, seed=5)
    assert epoch(1, again) == epoch(1), "a resumed run that has asked for no step before finds the same"
    other = BlockOrder(load_blocks(rows(12), max_seq_length=8), batch_size=3, accumulate=2, seed=6)
    assert epoch(0, other) != epoch(0)
    plain = BlockOrder(load_blocks(rows(12), max_seq_length=8), batch_size=3, accumulate=2, shuffle=False)
    assert epoch(0, plain) == epoch(1, plain) == list(range(12))


def test_a_micro_batch_alone_is_no_list_and_carries_what_is_added():
    mask = torch.ones(1, 1, 8, 8)
    batch = BlockOrder(load_blocks(rows(5), max_seq_length=8), batch_size=2, extra={"attention_mask": mask}, shuffle=False)(1)
    assert batch["input_ids"].tolist() == rows(5)[2:4].tolist() and batch["attention_mask"] is mask


def test_evaluation_takes_all_blocks_and_counts_targets():
    batches, counts = BlockOrder(load_blocks(rows(5), max_seq_length=8), batch_size=2).in_order()
    assert [len(batch["labels"]) for batch in batches] == [2, 2, 1] and counts == [14.0, 14.0, 7.0]


def test_too_few_blocks_for_one_step_are_refused():
    with pytest.raises(DatasetError, match=r"eval: 3 blocks of 8 tokens are fewer than the 4 of one step \(batch_size=2 x accumulate=2\)"):
        BlockOrder(load_blocks(rows(3), max_seq_length=8), batch_size=2, accumulate=2, name="eval")
