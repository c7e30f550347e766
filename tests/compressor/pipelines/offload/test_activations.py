"""The activation store gives back bitwise what was put, wherever it lay in between, keeps shared bytes once, and leaves nothing behind."""

from __future__ import annotations

import errno
import functools
import os
import random
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.errors import CalibrationError, OutputError
from compressor.pipelines.offload.activation_store import ActivationStore
from compressor.pipelines.offload.block_pool import SMALL_BYTES
from compressor.tracing.targets.running import MemoryStore, ValueStore
from tests import tiny

CPU = torch.device("cpu")
BIG = 1 << 40
PLACES = {"memory": BIG, "disk": 0}


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with ActivationStore(CPU, PLACES[request.param], disk_dir=tmp_path) as store:
        yield store


def filled(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def look(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg(), type(tensor)


def bits(tensor: Tensor) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes())


def assert_same(given: Tensor, kept: Tensor) -> None:
    assert look(given) == look(kept)
    assert bits(given) == bits(kept)


BASE = filled(64, 64)
TENSORS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: filled(40, 40),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 5),
    "transposed": lambda: filled(40, 50).t(),
    "row of many": lambda: filled(40, 50)[3],
    "every second": lambda: filled(40, 50)[::2, 1::3],
    "expanded": lambda: filled(1, 50).expand(30, 50),
    "overlapping": lambda: filled(3000).as_strided((100, 50), (7, 1), 11),
    "channels last": lambda: filled(2, 3, 20, 20).to(memory_format=torch.channels_last),
    "bool": lambda: filled(90, 90) > 0,
    "bfloat16": lambda: filled(90, 90).bfloat16(),
    "float8": lambda: filled(90, 90).to(torch.float8_e4m3fn),
    "NaN with payload": lambda: torch.tensor([0x7FC00001, 0x7F800001, -1] * 999, dtype=torch.int32).view(torch.float32),
    "conjugated": lambda: torch.view_as_complex(filled(900, 2)).conj(),
    "negated": lambda: torch.view_as_complex(filled(900, 2)).conj().imag,
    "made in inference mode": torch.inference_mode()(lambda: filled(50, 50)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_bit_for_bit_with_its_strides(name: str, store: ActivationStore) -> None:
    tensor = TENSORS[name]()
    expected = tensor.clone(memory_format=torch.preserve_format)
    store.put(0, {"x": tensor})
    for _ in range(2):
        kept = store.get(0)["x"]
        assert_same(tensor, kept)
        assert kept.tolist() == expected.tolist() or name == "NaN with payload"


def test_tensors_that_shared_memory_share_it_again(store: ActivationStore) -> None:
    whole = filled(50, 60)
    store.put(0, {"whole": whole, "rows": [whole[3:5], whole.t()], "again": whole, "bytes": whole.view(torch.uint8)})
    kept = store.get(0)
    assert kept["again"] is kept["whole"]
    kept["whole"].fill_(7)
    assert bool((kept["rows"][0] == 7).all()) and bool((kept["rows"][1] == 7).all())
    assert bytes(kept["bytes"].numpy().tobytes()) == bits(kept["whole"])


def test_outputs_and_caches_of_transformers_come_back_as_they_were(store: ActivationStore) -> None:
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache
    from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast

    caches: list[Any] = [DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())]
    for index, cache in enumerate((caches[0], caches[1].self_attention_cache)):
        cache.update(filled(1, 2, 40, 32, seed=index), filled(1, 2, 40, 32, seed=9), 0)
    config = tiny.config("llama", hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    static = StaticCache(config, max_cache_len=300)
    static.update(filled(1, 2, 9, 8), filled(1, 2, 9, 8), 0, {"cache_position": torch.arange(9)})
    hidden = filled(40, 40)
    key = next(one.name for one in fields(BaseModelOutputWithPast) if one.name in ("past_key_values", "cache"))  # from transformers 5.24 on
    output = BaseModelOutputWithPast(last_hidden_state=hidden, hidden_states=(hidden, filled(40, 40, seed=1)), **{key: caches[0]})
    store.put(0, {"output": output, "cache": caches[0], "both": caches[1], "static": static, "one": BaseModelOutput((filled(3, 3),))})
    kept = store.get(0)
    assert type(kept["output"]) is BaseModelOutputWithPast
    assert list(kept["output"].keys()) == ["last_hidden_state", key, "hidden_states"]
    assert getattr(kept["output"], key) is kept["output"][key] is kept["cache"] is not caches[0]
    assert kept["output"].hidden_states[0] is kept["output"][0]
    assert_same(hidden, kept["output"].last_hidden_state)
    assert_same(caches[0].layers[0].keys, kept["cache"].layers[0].keys)
    assert_same(caches[1].self_attention_cache.layers[0].keys, kept["both"].self_attention_cache.layers[0].keys)
    assert_same(static.layers[0].keys, kept["static"].layers[0].keys)
    assert_same(filled(3, 3), kept["one"].last_hidden_state[0])
    kept["cache"].update(filled(1, 2, 1, 32), filled(1, 2, 1, 32), 0)
    assert kept["cache"].get_seq_length() == 41
    assert store.get(0)["cache"].get_seq_length() == 40


class Holder:
    """Attributes and slots, a cycle, a bound method."""

    __slots__ = ("__dict__", "inside")

    def __init__(self, tensor: Tensor) -> None:
        self.inside = tensor
        self.items = [tensor, self]
        self.method = self.total

    def total(self) -> Tensor:
        return self.inside.sum()


def test_objects_of_any_kind_keep_their_relations(store: ActivationStore) -> None:
    marker, tensor, lock = object(), filled(50, 50), threading.Lock()
    holder = Holder(tensor)
    loop: list[Any] = [tensor]
    loop.append((loop, loop))
    generator = (number for number in (1, 2))
    values = {
        "holder": holder,
        "same": (holder, {"deep": [holder]}),
        "loop": loop,
        "marker": marker,
        "lock": lock,
        "generator": generator,
        "partial": functools.partial(torch.add, tensor, alpha=2),
        "set": {1, 2},
        "frozen": frozenset({(1, 2)}),
        "module": torch.nn.Linear(2, 2),
        "none": None,
        "size": torch.Size([1, 2]),
        "range": range(3),
    }
    store.put(0, values)
    kept = store.get(0)
    assert kept["holder"] is not holder and kept["same"][0] is kept["holder"] is kept["same"][1]["deep"][0] is kept["holder"].items[1]
    assert kept["holder"].inside is kept["holder"].items[0] is kept["loop"][0]
    assert kept["holder"].method.__self__ is kept["holder"]
    assert kept["loop"][1][0] is kept["loop"] and kept["loop"][1] is not loop[1]
    assert torch.equal(kept["partial"](tensor), tensor * 3) and kept["partial"].args[0] is kept["holder"].inside
    for name in ("marker", "lock", "generator", "module"):
        assert kept[name] is values[name]
    for name in ("set", "frozen", "none", "size", "range"):
        assert kept[name] == values[name] and type(kept[name]) is type(values[name])


class Picky:
    """Takes anything but a tensor."""

    def __init__(self, inside: Any) -> None:
        if isinstance(inside, Tensor):
            raise ValueError("no tensors")
        self.inside = inside

    def __reduce__(self) -> Any:
        return Picky, (self.inside,)


def test_an_object_that_cannot_be_built_again_is_an_error(store: ActivationStore) -> None:
    picky = Picky(None)
    picky.inside = filled(2)
    store.put(0, {"x": picky})
    with pytest.raises(CalibrationError, match=r"Picky: it can be copied without its tensors, but not with them"):
        store.get(0)


def test_what_by_reference_names_is_not_copied(tmp_path: Path) -> None:
    config = Holder(filled(2))
    with ActivationStore(CPU, BIG, by_reference=lambda value: value is config) as store:
        store.put(0, {"config": config, "other": Holder(filled(2))})
        assert store.get(0)["config"] is config


def test_parameters_stay_themselves(store: ActivationStore) -> None:
    parameter = torch.nn.Parameter(filled(50, 50))
    store.put(0, {"weight": parameter, "sparse": filled(50, 50).to_sparse()})
    assert store.get(0)["weight"] is parameter
    assert store.get(0)["sparse"].is_sparse


@pytest.mark.parametrize("identical", [True, False], ids=["one tensor", "computed anew"])
def test_bytes_of_many_samples_are_kept_once_and_written_by_none_of_them(identical: bool, store: ActivationStore) -> None:
    table = filled(100, 100)
    for sample in range(5):
        store.put(sample, {"hidden": filled(100, 100, seed=sample + 1), "table": table if identical else table.clone()})
    assert sum(store.used_bytes.values()) == 6 * 40_000
    store.get(3)["table"].zero_()
    for sample in range(5):
        assert torch.equal(store.get(sample)["table"], table)
    for sample in range(5):
        values = store.get(sample)
        store.put(sample, {"hidden": values["hidden"] + 1, "table": values["table"]})
    assert sum(store.used_bytes.values()) == 6 * 40_000
    for sample in range(4):
        store.drop(sample)
    assert sum(store.used_bytes.values()) == 2 * 40_000
    assert torch.equal(store.get(4)["table"], table)


def test_samples_that_look_alike_are_not_mistaken_for_each_other(store: ActivationStore) -> None:
    for sample in range(12):  # they differ in one byte between those that are compared first
        tensor = torch.zeros(100_000, dtype=torch.uint8)
        tensor[1000 + sample] = 1
        store.put(sample, {"x": tensor})
    for sample in range(12):
        assert store.get(sample)["x"].nonzero().tolist() == [[1000 + sample]]


def test_a_forward_that_writes_into_what_it_was_lent_changes_no_other_sample(store: ActivationStore) -> None:
    store.put(0, {"x": filled(50, 50)})
    lent = store.get(0)["x"]
    store.put(1, {"x": filled(50, 50)})  # equal by now, and kept beside
    lent.zero_()
    store.put(0, {"x": lent})
    assert torch.equal(store.get(1)["x"], filled(50, 50))
    assert not store.get(0)["x"].any()


def test_the_budget_decides_where_a_sample_lies_and_what_fits_stays(tmp_path: Path) -> None:
    size = 40_000
    with ActivationStore(CPU, 2 * size, host_budget_bytes=size, disk_dir=tmp_path) as store:
        for _ in range(3):  # every round finds the same samples in memory
            for sample in range(5):
                store.put(sample, {"x": filled(100, 100, seed=sample)})
            assert store.used_bytes == {"device": 3 * size, "disk": 2 * size}
        assert store.peak_bytes == {"device": 3 * size, "disk": 2 * size}
        for sample in range(5):
            assert torch.equal(store.get(sample)["x"], filled(100, 100, seed=sample))


def test_what_waits_in_main_memory_leaves_the_heap_once() -> None:
    large, small = torch.arange(1 << 18), torch.arange(1 << 10)
    with ActivationStore(torch.device("cpu"), 1 << 30) as store:
        store.put(0, {"large": large, "small": small})
        first = store.get(0)
        store.put(0, first)
        again = store.get(0)
    assert torch.equal(again["large"], large) and first["large"].data_ptr() != large.data_ptr(), "copied to pages of its own"
    assert again["large"].data_ptr() == first["large"].data_ptr() and again["small"].data_ptr() == small.data_ptr(), "nothing to gain"


def test_without_a_folder_too_small_a_budget_is_an_error_that_names_the_remedies() -> None:
    with ActivationStore(CPU, 50_000) as store:
        store.put(0, {"x": filled(100, 100)})
        with pytest.raises(CalibrationError, match=r"sample 1 needs 40,000 bytes more .*50,000 bytes.*offload_dir"):
            store.put(1, {"x": filled(100, 100, seed=1)})


def test_small_tensors_stay_in_memory(tmp_path: Path) -> None:
    with ActivationStore(CPU, 0, disk_dir=tmp_path) as store:
        store.put(0, {"x": torch.zeros(SMALL_BYTES, dtype=torch.uint8), "y": torch.zeros(SMALL_BYTES + 1, dtype=torch.uint8)})
        assert store.used_bytes == {"device": SMALL_BYTES, "disk": SMALL_BYTES + 1}


def test_the_file_has_no_name_and_its_places_are_used_again(tmp_path: Path) -> None:
    with ActivationStore(CPU, 0, disk_dir=tmp_path) as store:
        for turn in range(20):
            for sample in range(4):
                store.put(sample, {"x": filled(100, 100 + sample + turn, seed=sample)})
        assert list(tmp_path.iterdir()) == []
        size = os.fstat(_scratch(tmp_path)).st_size
        assert 0 < size < 8 * 60_000
        for sample in range(4):
            store.drop(sample)
        store.put(0, {"x": filled(4, size // 16)})  # what is dropped leaves one place, which takes it all
        assert os.fstat(_scratch(tmp_path)).st_size == size
    store.close()
    assert list(tmp_path.iterdir()) == []


def _scratch(folder: Path) -> int:
    """The descriptor of the one file below a folder that this process holds open."""
    held = {file: file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}  # that of the listing is gone
    (found,) = [int(file.name) for file, path in held.items() if path.is_relative_to(folder)]
    return found


@pytest.mark.parametrize("damage", ["a flipped bit", "a truncated file"])
@pytest.mark.parametrize("prefetched", [True, False])
def test_a_damaged_file_is_named(damage: str, prefetched: bool, tmp_path: Path) -> None:
    with ActivationStore(CPU, 0, disk_dir=tmp_path) as store:
        store.put(0, {"x": filled(100, 100)})
        if damage == "a flipped bit":
            byte = os.pread(_scratch(tmp_path), 1, 777)[0]
            os.pwrite(_scratch(tmp_path), bytes([byte ^ 1]), 777)
        else:
            os.ftruncate(_scratch(tmp_path), 39_999)
        if prefetched:
            store.prefetch(0)
        with pytest.raises(CalibrationError, match="sample 0 does not read back as it was written"):
            store.get(0)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 60_000

    def pwrite(file: int, data: Any, offset: int) -> int:
        if offset >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(file, data[: room - offset], offset)

    plain = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    with ActivationStore(CPU, 0, disk_dir=tmp_path) as store:
        store.put(0, {"x": filled(100, 100)})
        with pytest.raises(CalibrationError, match=r"sample 1 needs 40,000 bytes, the disk took 20,000 of them \(No space left"):
            store.put(1, {"x": filled(100, 100, seed=1)})
        assert torch.equal(store.get(0)["x"], filled(100, 100))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"offload_dir: no file can be made in .*missing"):
        ActivationStore(CPU, 0, disk_dir=tmp_path / "missing")


def test_prefetch_reads_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = []

    def preadv(*args: Any) -> int:
        readers.append(threading.current_thread().name)
        return plain(*args)

    plain = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    with ActivationStore(CPU, 0, disk_dir=tmp_path) as store:
        store.put(0, {"x": filled(100, 100)})
        store.prefetch(0)
        store.prefetch(0)
        store.prefetch(99)
        assert torch.equal(store.get(0)["x"], filled(100, 100))
        assert len(readers) == 1 and readers[0].startswith("activations")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("activations")]


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls_gives_what_plain_memory_gives(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    plain: ValueStore = MemoryStore()
    known: set[int] = set()
    with ActivationStore(CPU, draw.choice([0, 100_000, BIG]), disk_dir=tmp_path) as store:
        assert isinstance(store, ValueStore)
        for step in range(120):
            sample, action = draw.randrange(6), draw.choice(["put", "put", "get", "pass on", "prefetch", "drop"])
            if action == "put":
                values = {"x": filled(draw.randrange(1, 80), 50, seed=step), "table": filled(60, 60, seed=draw.randrange(3))}
                plain.put(sample, {name: tensor.clone() for name, tensor in values.items()})
                store.put(sample, values)
                known.add(sample)
            elif action == "pass on" and sample in known:
                values = store.get(sample)
                values["x"].add_(1)
                expected = plain.get(sample)
                plain.put(sample, {"x": expected["x"] + 1, "table": expected["table"]})
                store.put(sample, values)
            elif action == "prefetch":
                store.prefetch(sample)
            elif action == "drop":
                store.drop(sample)
                plain.drop(sample)
                known.discard(sample)
            for name in ("x", "table") if sample in known else ():
                assert torch.equal(store.get(sample)[name], plain.get(sample)[name])
        for sample in range(6):
            store.drop(sample)
        assert not any(store.used_bytes.values())


def test_an_unknown_sample_is_a_key_error(store: ActivationStore) -> None:
    for missing in (store, MemoryStore()):
        with pytest.raises(KeyError):
            missing.get(5)


def test_memory_store_forgets_what_is_dropped() -> None:
    store = MemoryStore()
    store.put(0, {"x": BASE})
    store.put(1, {"x": BASE})
    assert store.get(0)["x"] is BASE
    store.prefetch(0)
    store.drop(0)
    store.drop(0)
    store.close()
    for sample in (0, 1):
        with pytest.raises(KeyError):
            store.get(sample)
