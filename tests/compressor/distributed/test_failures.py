"""Ways in which a run of several processes fails: all end within ten seconds, one message says why, and it goes on to the same bytes."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch import distributed as dist

from compressor.distributed.watch import Watch
from compressor.errors import RankError
from tests.compressor.distributed.rank_failures import MOMENTS, run_ranks
from tests.compressor.distributed.rank_jobs import CONTEXT

RECIPE = (
    "quant_modifiers: {GPTQModifier: {ignore: [lm_head], config_groups: {all: {targets: [Linear], "
    "weights: {num_bits: 4, type: int, strategy: group, group_size: 16, symmetric: true}}}}}"
)
SECONDS = 10.0
OF_THE_FIRST = ("it solves", "a stage is noted", "the checkpoint is flushed")

# How it fails, when, and which of two ranks: those that write are the first, so that some moments are its own.
FAILURES = [
    *(("SIGKILL", moment, 0) for moment in MOMENTS),
    *(("SIGKILL", moment, 1) for moment in MOMENTS if moment not in OF_THE_FIRST),
    *(("SIGTERM", moment, 0) for moment in ("it loads", "it traces", "it solves", "the checkpoint is flushed")),
    *(("SIGTERM", moment, 1) for moment in ("it calibrates", "all is compressed")),
    *(("SIGINT", "it calibrates", rank) for rank in (0, 1)),
    *(("SIGSTOP", moment, 0) for moment in ("it calibrates", "a stage is noted", "the checkpoint is flushed")),
    *(("SIGSTOP", moment, 1) for moment in ("it traces", "sums are added up", "all is compressed")),
    *(("an error of ours", moment, rank) for moment, rank in (("it loads", 0), ("it calibrates", 1), ("it solves", 0))),
    *(("no memory", moment, 1) for moment in ("it traces", "it calibrates")),
    *(("no link to the store", moment, rank) for moment, rank in (("it calibrates", 0), ("sums are added up", 1))),
    *(("no link to ranks", moment, rank) for moment, rank in (("it calibrates", 1), ("sums are added up", 0), ("a stage ends", 0))),
    *(("no link", moment, rank) for moment, rank in (("it calibrates", 1), ("a stage ends", 0))),
    *(("a full disk", moment, 0) for moment in ("it loads", "a stage ends", "all is compressed")),
    *(("a disk that fails", moment, 0) for moment in ("it traces", "a stage ends", "all is compressed", "the checkpoint is flushed")),
]


def arguments(model: Path, output: Path) -> list[str]:
    data = ["--dataset", str(model / "data.safetensors"), "--max-seq-length", "96"]
    return ["oneshot", str(model), "--recipe", RECIPE, *data, "--output-dir", str(output)]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The checkpoint of one process."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_ranks(1, folder / "ranks", arguments(model, folder / "out")).codes == [0]
    return files(folder / "out")


@pytest.mark.parametrize("number", range(len(FAILURES)), ids=["-".join(map(str, one)).replace(" ", "-") for one in FAILURES])
def test_all_end_with_one_message_and_go_on_to_the_same_bytes(number: int, model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    how, moment, _ = FAILURES[number]
    command = arguments(model, tmp_path / "out")
    # Every other run as under torchrun, without which nobody knows of a rank that has not come; each goes on with another number of them.
    ended = run_ranks(2, tmp_path / "fails", command, FAILURES[number], helped=number % 2 == 0 or moment == "it comes")
    said = [line for text in ended.said for line in text.splitlines() if line.startswith("compressor")]
    is_mended = how == "no link to the store"  # by another connection
    assert all((code == 0) is is_mended for code in ended.codes) and ended.seconds > 0, ended
    assert len(said) == (0 if is_mended else 1) and not any("Traceback" in text for text in ended.said), ended.said
    assert is_mended or ended.seconds < SECONDS, ended
    again = run_ranks((1, 2, 4)[number % 3], tmp_path / "again", [*command, "--resume"])
    assert not any(again.codes), again.said
    assert files(tmp_path / "out") == whole
    assert {path.name for path in tmp_path.iterdir()} == {"fails", "again", "out"}


def _serve(file: Path) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    file.with_suffix(".new").write_text(str(store.port))
    file.with_suffix(".new").rename(file)
    time.sleep(600)


def test_a_store_whose_process_is_killed_ends_all_in_seconds(tmp_path: Path) -> None:
    """As that of torchrun, where the system kills it: no other connection can be had."""
    file = tmp_path / "port"
    server = CONTEXT.Process(target=_serve, args=(file,))
    server.start()
    while not file.exists():
        time.sleep(0.02)
    watch = Watch(dist.PrefixStore("a run", dist.TCPStore("localhost", int(file.read_text()), is_master=False)), 0, 2)  # type: ignore[attr-defined]
    watch.check()
    server.kill()
    server.join()
    found: list[str] = []

    def look() -> None:
        with suppress(RankError):
            while not found:
                time.sleep(0.1)
                watch.check()
        found.append("ended")
        watch.close()
        found.append("closed")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(30)
    assert found == ["ended", "closed"]
    with pytest.raises(RankError, match=r"^rank 0 of 2: lost the rendezvous store \("):
        watch.check()
