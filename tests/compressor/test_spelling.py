from __future__ import annotations

from compressor.spelling import did_you_mean, nearest, suggest


def test_a_near_word_is_asked_for_and_a_hopeless_one_answered_with_all() -> None:
    assert suggest("blok_size", ["block_size", "x"]) == "did you mean 'block_size'?"
    assert suggest("blok_size", ["block_size", "x"], show=str) == "did you mean block_size?"
    assert suggest("q", ["a", "b"]) == "choose from a, b"
    assert suggest("q", ["a", "b"], otherwise="see the list") == "see the list"
    assert suggest("q", []) == "leave it out"


def test_a_long_list_begins_with_what_holds_the_word_and_then_with_what_is_most_like_it() -> None:
    known = [*"abcdefgh", "plan", "num_samples_of_data"]
    assert suggest("samples", known).startswith("choose from num_samples_of_data, a, e, plan, b, ")
    assert suggest("samples", known[2:]) == "choose from c, d, e, f, g, h, plan, num_samples_of_data"  # short: in its own order


def test_a_question_before_more_words_ends_in_a_space_and_is_left_out_where_nothing_is_near() -> None:
    assert did_you_mean("role_weight", ["role-weights", "numeric-equal"]) == "did you mean 'role-weights'? "
    assert did_you_mean("quux", ["role-weights", "numeric-equal"]) == ""


def test_the_nearest_words_come_first_whatever_their_case() -> None:
    assert nearest("LINEAR", ["Linear", "linear", "conv"], count=3) == ["Linear", "linear"]
    assert nearest("lm_haed", ["embed", "lm_head"]) == ["lm_head"]
