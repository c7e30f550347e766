"""The verb: exit codes, flags, JSON, and the file that it writes."""

from __future__ import annotations

import json

import pytest

from harness import cli


@pytest.fixture
def broken(spoiled):
    return spoiled(lambda tensors: tensors["model.layers.3.mlp.up_proj.weight_scale"].mul_(2))


@pytest.fixture
def command(tiny_base, tiny_tokens, capsys):
    def run(compressed, *flags):
        code = cli.main(["bisect", str(tiny_base), str(compressed), "--dataset", str(tiny_tokens), "--device", "cpu", "--quiet", *flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_text_names_layer_module_modifier_stage_and_prints_the_test(command, broken):
    code, out, _ = command(broken)
    assert code == 1
    for words in (
        "layer       model.layers.3: alone",
        "module    model.layers.3.mlp.up_proj",
        "modifier  QuantizationModifier (int8 channel",
        "stage     first_stage",
        "passes      14 over the data, where one per module would be 36",
        "answer      found",
        "def test_model_layers_3_mlp_up_proj",
    ):
        assert words in out, out


def test_json_holds_the_same_and_the_file_is_written_whole(command, broken, tmp_path):
    code, out, _ = command(broken, "--json", "--test", str(tmp_path / "test_it.py"), "--measure", "sqnr", "--limit", "15")
    data = json.loads(out)
    assert (code, data["verdict"], data["answer"], data["measure"]) == (1, "regression", "found", "sqnr")
    assert data["limit"] == pytest.approx(10**-1.5)
    assert data["layers"][0]["modules"][0]["module"] == "model.layers.3.mlp.up_proj"
    assert (tmp_path / "test_it.py").read_text() == data["test"]
    compile(data["test"], "test_it.py", "exec")


def test_exit_codes_tell_no_difference_found_and_spread(command, broken, tiny_compressed):
    assert command(tiny_compressed, "--limit", "5")[0] == 0
    assert command(broken)[0] == 1
    total = json.loads(command(tiny_compressed, "--json")[1])["total"]
    code, out, _ = command(tiny_compressed, "--limit", str(total * 0.9))
    assert code == 2
    assert "answer      spread" in out
    assert "model.layers.4" in out


def test_fewer_and_shorter_sequences_are_taken_when_asked(command, broken):
    few = json.loads(command(broken, "--json", "--num-samples", "2", "--max-seq-length", "5")[1])
    assert few["num_sequences"] == 2
    tokens = next(line for line in few["test"].splitlines() if line.startswith("TOKENS"))
    assert tokens.count(",") == 4


def test_mistakes_are_one_line_and_exit_with_3(command, broken, tiny_base, tmp_path, capsys):
    (tmp_path / "there.py").write_text("kept")
    for compressed, flags, word in (
        (tmp_path / "nowhere", [], "no such folder"),
        (tiny_base, [], "two folders"),
        (broken, ["--test", str(tmp_path / "there.py")], "exists already"),
        (broken, ["--test", str(tmp_path / "no" / "test.py")], "does not exist"),
    ):
        code, out, err = command(compressed, *flags)
        assert (code, out) == (3, "")
        assert word in err
        assert err.count("\n") == 1
    assert (tmp_path / "there.py").read_text() == "kept"
    for flags in (["--limit", "-1"], ["--limit", "nan"], ["--num-samples", "0"], ["--measure", "l1"]):
        with pytest.raises(SystemExit) as caught:
            command(broken, *flags)
        assert caught.value.code == 3
