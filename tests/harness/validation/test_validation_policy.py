"""A policy file is read strictly: unknown names come back with line and nearest name, values out of range with the rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.errors import UserInputError
from harness.validation.policy import Policy, load_policy


def write(folder: Path, text: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


def test_defaults_stand_where_the_file_is_silent(tmp_path):
    assert load_policy(None) == Policy()
    assert load_policy(write(tmp_path, "")) == Policy()
    policy = load_policy(str(write(tmp_path, "max_perplexity_ratio: 1.02\nmin_sqnr_db:\n  int4: 15\n")))
    assert policy.max_perplexity_ratio == 1.02
    assert policy.min_sqnr_db.int4 == 15
    assert policy.min_sqnr_db.int8 == Policy().min_sqnr_db.int8
    assert policy.max_mean_kl == Policy().max_mean_kl


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n\nmax_mean_lk: 1\n", "policy.yaml:3: max_mean_lk: is no limit; did you mean max_mean_kl?"),
        ("min_sqnr_db:\n  int4: 9\n  in8: 3\n", "policy.yaml:3: min_sqnr_db.in8: is no limit; did you mean int8?"),
        ("zzz: 1\n", "policy.yaml:1: zzz: is no limit; known are allow_dequantize_load, allow_unserved_schemes, confidence"),
        ("confidence: 2\n", "policy.yaml:1: confidence: 2 is not allowed: input should be less than or equal to 0.9999"),
        ("max_perplexity_ratio: 0.9\n", "0.9 is not allowed: input should be greater than 1"),
        ("max_mean_kl: .nan\n", "nan is not allowed"),
        ("min_sqnr_db: {int8: .nan}\n", "nan is not allowed"),
        ("min_sqnr_db: {int8: -.inf}\n", "-inf is not allowed"),
        ("num_resamples: 10\n", "10 is not allowed: input should be greater than or equal to 10000"),
        ("max_mean_kl: low\n", "'low' is not allowed"),
        ("max_mean_kl: 1\nmax_mean_kl: 2\n", "policy.yaml:2: 'max_mean_kl' stands twice in one mapping; keep one"),
        ("- a\n", "policy.yaml:1: holds no mapping"),
        ("a: [1\n", "policy.yaml:2: this is not safe YAML"),
        ("a: !!python/object/apply:os.system [x]\n", "policy.yaml:1: this is not safe YAML"),
        ("a: " + "[" * 1_000, "policy.yaml: its entries are nested too deeply"),
        ("a: &a [*a]\n", "policy.yaml:1: the aliases in this text expand without bounds"),
        ("max_mean_kl: yes\n", "policy.yaml:1: max_mean_kl: True is not allowed: a truth value stands where another value belongs"),
        ("min_sqnr_db: {int8: true}\n", "min_sqnr_db.int8: True is not allowed"),
        ("min_sqnr_db: {int9: 3}\n", "policy.yaml:1: min_sqnr_db.int9: is no limit; did you mean int8?"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path, text, message):
    with pytest.raises(UserInputError) as caught:
        load_policy(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(UserInputError) as caught:
        load_policy(write(tmp_path, "confidence: 3\nfoo: 1\n"))
    assert "policy.yaml:1: confidence" in str(caught.value)
    assert "policy.yaml:2: foo" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserInputError, match="no such policy file"):
        load_policy(tmp_path / "nowhere.yaml")


def test_a_function_takes_limits_or_their_file_and_nothing_else(tmp_path):
    from harness.validation.policy import policy_of

    path = tmp_path / "policy.yaml"
    path.write_text("max_mean_kl: 0.5\n", encoding="utf-8")
    assert policy_of(path).max_mean_kl == policy_of(str(path)).max_mean_kl == policy_of(Policy(max_mean_kl=0.5)).max_mean_kl == 0.5
    assert policy_of(None) == Policy()
    with pytest.raises(UserInputError, match="policy: a dict was given"):
        policy_of({"max_mean_kl": 0.5})


@pytest.mark.parametrize("wrong", [{"num_samples": "8"}, {"seed": 0.5}, {"max_seq_length": [4]}, {"policy": 3}])
def test_a_setting_of_the_wrong_kind_is_named(wrong, tmp_path):
    from harness import validate

    with pytest.raises(UserInputError, match=next(iter(wrong))):
        validate(tmp_path / "base", tmp_path / "compressed", "data.jsonl", **wrong)
