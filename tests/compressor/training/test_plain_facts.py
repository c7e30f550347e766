"""Values that hold no tensor, where a step may read them: another one is refused at once, also one that `==` calls equal."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import datetime
import enum
import functools
import weakref
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn.functional import cross_entropy

from compressor.errors import GuardDriftError, HostReadError, PlanStormError
from compressor.training import Trainer, TrainStep, adamw


class _List(list[int]):
    factor = 0.0


class _Dict(dict[str, int]):
    factor = 0.0


class _Tuple(tuple[int, ...]):
    factor = 0.0


class _Float(float):
    pass


class _Member(enum.Enum):
    HALF = 0.5

    def __init__(self, value: float) -> None:
        self.factor = value

    def doubled(self) -> float:
        return 2 * self.factor


_One = collections.namedtuple("_One", "a")
_Other = collections.namedtuple("_Other", "a")


def _with_factor(value: Any) -> Any:
    value.factor = 2.0
    return value


def _set_of(*items: int) -> set[int]:
    held: set[int] = set()
    for item in items:  # 0 and 8 meet in the table, and the first one comes first
        held.add(item)
    return held


REPLACED: dict[str, tuple[Any, Any]] = {
    "torch.dtype": (torch.float32, torch.bfloat16),
    "a scalar of numpy": (np.float32(2), np.float32(3)),
    "another type of scalar": (np.float32(2), np.float64(2)),
    "torch.Size": (torch.Size([8]), torch.Size([9])),
    "a size and a tuple": (torch.Size([8]), (8,)),
    "slice": (slice(0, 4), slice(0, 5)),
    "slice of equal numbers": (slice(0, 1), slice(False, True)),
    "range": (range(3), range(4)),
    "bytearray": (bytearray(b"a"), bytearray(b"b")),
    "timedelta": (datetime.timedelta(1), datetime.timedelta(2)),
    "a repeated hour": (datetime.datetime(2000, 1, 1), datetime.datetime(2000, 1, 1, fold=1)),
    "Decimal": (Decimal("1"), Decimal("1.0")),
    "int and float": (1, 1.0),
    "int and bool": (1, True),
    "sign of zero": (0.0, -0.0),
    "sign of an imaginary zero": (complex(0.0, 0.0), complex(0.0, -0.0)),
    "a tuple of another type": ((1,), (1.0,)),
    "a tuple of another number": ((1,), (2,)),
    "a named tuple and a tuple": (_One(1), (1,)),
    "two named tuples": (_One(1), _Other(1)),
    "a key of another type": ({1: 2}, {True: 2}),
    "sign of a zero in a dict": ({"a": 0.0}, {"a": -0.0}),
    "dtype of an array": (np.zeros(4, np.int8), np.zeros(4, np.uint8)),
    "strides of an array": (np.zeros(4), np.zeros(8)[::2]),
    "fields of an array": (np.zeros(1, [("a", "i4")]), np.zeros(1, [("b", "i4")])),
    "type of an array of Python": (array.array("b", [1]), array.array("B", [1])),
    "order of a set": (_set_of(0, 8), _set_of(8, 0)),
    "frozenset": (frozenset([1]), frozenset([2])),
    "class of a list": (_List([1]), [1]),
    "a number of a class of one's own": (_Float(2), _Float(3)),
    "length of a deque": (collections.deque([1], maxlen=2), collections.deque([1], maxlen=3)),
    "what a missing key gives": (collections.defaultdict(int), collections.defaultdict(float)),
    "an object": (SimpleNamespace(k=1), SimpleNamespace(k=True)),
}
IN_PLACE: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "bytearray": (bytearray(b"a"), lambda held: held.append(1)),
    "an array": (np.zeros(4), lambda held: held.fill(1)),
    "an array in a tuple": ((np.zeros(4),), lambda held: held[0].fill(1)),
    "dtype of an array": (np.zeros(4, np.int8), lambda held: setattr(held, "dtype", np.uint8)),
    "an array of Python": (array.array("b", [1]), lambda held: held.append(1)),
    "a bytearray of 64 KiB": (bytearray(1 << 16), lambda held: held.__setitem__(-1, 1)),
    "an array of 64 KiB": (array.array("B", bytes(1 << 16)), lambda held: held.__setitem__(-1, 1)),
    "a list": ([0.0], lambda held: held.__setitem__(0, -0.0)),
    "a key": ({"a": "v"}, lambda held: held.update(b=held.pop("a"))),
    "type of a key": ({1: "v"}, lambda held: held.update({True: held.pop(1)})),
    "what a missing key gives": (collections.defaultdict(int), lambda held: setattr(held, "default_factory", float)),
    "the same, deeper": ([collections.defaultdict(int)], lambda held: setattr(held[0], "default_factory", float)),
    "attribute of a list": (_with_factor(_List([1])), lambda held: setattr(held, "factor", 3.0)),
    "attribute of a dict": (_with_factor(_Dict()), lambda held: setattr(held, "factor", 3.0)),
    "attribute of a tuple": (_with_factor(_Tuple([1])), lambda held: setattr(held, "factor", 3.0)),
}
EQUAL: dict[str, Callable[[], Any]] = {
    "numbers": lambda: (1, 2.5, float("nan"), -0.0, "".join(["a", "b"])),
    "a scalar of numpy": lambda: np.float32(2),
    "slice": lambda: slice(0, 400),
    "torch.Size": lambda: torch.Size([8, 800]),
    "a method": lambda: _Member.HALF.doubled,
    "date": lambda: datetime.date(2000, 1, 1),
    "an array": lambda: np.zeros(4),
    "containers": lambda: [1, {"a": {2, 3}}, collections.deque([4], maxlen=5)],
}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def _batch(number: int) -> dict[str, Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
    return {"x": x, "y": (x.sum(1) > 0).long()}


def _replaying(loss_fn: Callable[..., Tensor] = _loss, **held: Any) -> Trainer:
    """Make a trainer that replays, without audits: what the guards do not see would never be found."""
    model = nn.Linear(6, 2)
    vars(model).update(held)
    trainer = Trainer(TrainStep(model, loss_fn, adamw(model.parameters(), lr=1e-2)), "replay", warmup=1, audit_every=0)
    for number in range(4):
        trainer.train_step(_batch(number))
    assert trainer.last_action == "replay"
    return trainer


def _assert_refused(trainer: Trainer, what: str) -> None:
    with pytest.raises(GuardDriftError, match=what):
        trainer.train_step(_batch(4))


@pytest.mark.parametrize("name", REPLACED)
def test_another_value_of_an_attribute_is_refused_at_once(name: str) -> None:
    old, new = REPLACED[name]
    trainer = _replaying(held=old, holder=[old])
    trainer.step.model.held = new
    _assert_refused(trainer, "held")
    trainer.step.model.held = old
    trainer.train_step(_batch(4))
    trainer.step.model.holder[0] = new
    _assert_refused(trainer, "holder")


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_value_changed_in_place_is_refused_at_once(name: str) -> None:
    value, change = IN_PLACE[name]
    held = copy.deepcopy(value)
    trainer = _replaying(held=held)
    change(held)
    _assert_refused(trainer, "held")


@pytest.mark.parametrize("name", EQUAL)
def test_an_equal_value_in_its_place_is_taken(name: str) -> None:
    trainer = _replaying(held=EQUAL[name](), holder=[EQUAL[name]()])
    trainer.step.model.held, trainer.step.model.holder[0] = EQUAL[name](), EQUAL[name]()
    trainer.train_step(_batch(4))
    assert trainer.last_action == "replay"


def test_settings_of_a_captured_optimizer_are_told_by_type() -> None:
    trainer = _replaying()
    group = trainer.step.optimizer.param_groups[0]
    assert group["maximize"] is False
    group["maximize"] = 0
    _assert_refused(trainer, "optimizer group 0: maximize was False and is now 0")


def _by_value(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return _loss(model, batch) * _Member(0.5).factor


def test_a_member_of_an_enum_that_is_reached_by_its_value_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _replaying(_by_value)
    monkeypatch.setattr(_Member.HALF, "factor", 3.0)
    _assert_refused(trainer, "members of class _Member")


@pytest.mark.parametrize(("text", "new"), [("__doc__", "another"), ("__name__", "another"), ("__module__", "a")])
@pytest.mark.parametrize("of", ["function", "class"])
def test_what_a_function_or_a_class_says_of_itself_is_watched_where_code_names_it(text: str, new: str, of: str) -> None:
    def function() -> None:
        """One."""

    class Class:
        """One."""

    speaker: Any = function if of == "function" else Class
    read = {
        "__doc__": lambda model, batch: _loss(model, batch) * len(speaker.__doc__),
        "__name__": lambda model, batch: _loss(model, batch) * len(speaker.__name__),
        "__module__": lambda model, batch: _loss(model, batch) * len(speaker.__module__),
    }[text]
    trainer = _replaying(read)
    setattr(speaker, text, new)
    _assert_refused(trainer, text)


def test_annotations_of_a_function_are_watched_in_place() -> None:
    def function() -> None: ...

    trainer = _replaying(lambda model, batch: _loss(model, batch) * function.__annotations__.get("factor", 2.0))
    function.__annotations__["factor"] = 3.0
    _assert_refused(trainer, "__annotations__")


@pytest.fixture
def default_validation() -> Iterator[None]:
    """Validate as torch does until its compiler is used, which switches that off."""
    before = distributions.Distribution._validate_args
    distributions.Distribution.set_default_validate_args(True)
    yield
    distributions.Distribution.set_default_validate_args(before)


DRAWS: dict[str, Callable[[], Tensor]] = {
    "StudentT": lambda: distributions.StudentT(torch.tensor(3.0), validate_args=False).rsample((8, 6)),
    "RelaxedBernoulli": lambda: distributions.RelaxedBernoulli(torch.tensor(0.5), torch.full((8, 6), 0.5), validate_args=False).rsample(),
    "ContinuousBernoulli": lambda: distributions.ContinuousBernoulli(torch.full((8, 6), 0.3)).rsample(),
}


def _drawing(draw: Callable[[], Tensor]) -> Callable[..., Tensor]:
    return lambda model, batch: cross_entropy(model(batch["x"] + draw()), batch["y"])


@pytest.mark.parametrize("name", DRAWS)
def test_a_distribution_that_makes_others_gets_the_switch_that_helps(name: str, default_validation: None) -> None:
    with pytest.raises(HostReadError) as caught:
        _replaying(_drawing(DRAWS[name]))
    assert "call torch.distributions.Distribution.set_default_validate_args(False) instead" in str(caught.value)
    distributions.Distribution.set_default_validate_args(False)
    assert _replaying(_drawing(DRAWS[name])).last_action == "replay"


def test_a_distribution_that_reads_whatever_is_set_is_sent_outside_of_the_step() -> None:
    def draw() -> Tensor:
        return distributions.VonMises(torch.zeros(8, 6), torch.ones(8, 6), validate_args=False).sample()

    with pytest.raises(HostReadError, match="run it outside of the step, and give what it gave with the batch") as caught:
        _replaying(_drawing(draw))
    assert "validate_args" not in str(caught.value)


class _Key:
    factor = 1.0


class _SlotKey:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


@dataclasses.dataclass(frozen=True)
class _FrozenKey:
    factor: _Key


def _first_key(held: Any) -> Any:
    return next(iter(held))


KEYS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an object": (lambda: {_Key(): 0}, _first_key),
    "an object with slots": (lambda: {_SlotKey(): 0}, _first_key),
    "within a tuple": (lambda: {(1, _Key()): 0}, lambda held: _first_key(held)[1]),
    "within a frozen dataclass": (lambda: {_FrozenKey(_Key()): 0}, lambda held: _first_key(held).factor),
    "of a defaultdict": (lambda: collections.defaultdict(int, {_Key(): 0}), _first_key),
    "of a dict in a list": (lambda: [{_Key(): 0}], lambda held: _first_key(held[0])),
    "a tensor": (lambda: {_with_factor(torch.ones(1)): 0}, _first_key),
}


@pytest.mark.parametrize("name", KEYS)
def test_of_a_key_as_much_is_seen_as_of_a_member_of_a_set(name: str) -> None:
    make, key_of = KEYS[name]
    held = make()
    trainer = _replaying(lambda model, batch: _loss(model, batch) * float(getattr(key_of(held), "factor", 1.0)))
    key_of(held).factor = 3.0
    _assert_refused(trainer, "factor")


def test_values_of_two_keys_that_are_spelled_alike_are_told_apart() -> None:
    first = [1.0]
    holder = SimpleNamespace(held={_Key(): first, _Key(): [1.0]})
    trainer = _replaying(lambda model, batch: _loss(model, batch) * next(iter(holder.held.values()))[0])
    first[0] = 2.0
    _assert_refused(trainer, "content of")


class _Text(str):
    __slots__ = ()


class _Set(set[int]):
    pass


class _Bound(functools.partial):  # type: ignore[type-arg]
    pass


class _Meta(type):
    pass


class _OfMeta(metaclass=_Meta):
    pass


def _two(*given: Any) -> Any:
    return 2


SPECIAL: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a list": (_List([1]), "__getitem__", lambda held: held[0]),
    "a list that is asked for its length": (_List([1]), "__len__", len),
    "a list that is gone through": (_List([1]), "__iter__", lambda held: sum(held)),
    "a dict": (_Dict(a=1), "__missing__", lambda held: held["b"]),
    "a set": (_Set([1]), "__contains__", lambda held: 1 in held),
    "a tuple": (_Tuple([1]), "__getitem__", lambda held: held[0]),
    "a named tuple": (_One(1), "__getitem__", lambda held: held[0]),
    "a text": (_Text("a"), "__len__", len),
    "a number": (_Float(1.0), "__add__", lambda held: held + 1),
    "a partial": (_Bound(max, 1, 0), "__call__", lambda held: held()),
    "a class": (_OfMeta, "__getitem__", lambda held: held[0]),
    "an object": (_Key(), "__bool__", bool),
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("plain", [True, False], ids=["function", "callable"])
def test_a_special_method_that_is_exchanged_is_refused(name: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held, method, read = SPECIAL[name]

    def one(*given: Any) -> Any:
        return iter([1]) if method == "__iter__" else 1 if method != "__bool__" else True

    monkeypatch.setattr(type(held), method, one if plain else functools.partial(one), raising=False)
    trainer = _replaying(lambda model, batch: _loss(model, batch) * read(held))
    monkeypatch.setattr(type(held), method, _two)
    _assert_refused(trainer, method)


def test_a_class_that_takes_the_place_of_that_of_a_list_is_refused() -> None:
    class Other(list[int]):
        pass

    held: Any = Other([1])
    trainer = _replaying(lambda model, batch: _loss(model, batch) * held[0])
    held.__class__ = _List
    _assert_refused(trainer, "Other.* is now .*_List")


def test_a_global_that_comes_to_shadow_a_builtin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _replaying(lambda model, batch: _loss(model, batch) * abs(-1))
    monkeypatch.setitem(globals(), "abs", _two)
    _assert_refused(trainer, "global 'abs' that loss_fn reads")
    monkeypatch.delitem(globals(), "abs")
    monkeypatch.setattr("builtins.abs", _two)
    _assert_refused(trainer, "'abs' of module builtins")


_LONG = 1 << 20000
LONG: dict[str, Any] = {
    "itself": _LONG,
    "in a list": [_LONG],
    "a key": {_LONG: [1]},
    "in a set": {_LONG},
    "a range": range(_LONG),
    "a slice": slice(_LONG),
    "a fraction": [Fraction(_LONG, 3)],
}


@pytest.mark.parametrize("name", LONG)
def test_a_number_too_long_to_be_written_out_is_as_good_as_any(name: str) -> None:
    held = LONG[name]
    trainer = _replaying(lambda model, batch: _loss(model, batch) + 0 * (_Member(0.5) is None), of_module=held)
    trainer.step.model.of_module = copy.deepcopy(held)
    trainer.train_step(_batch(4))
    assert trainer.last_action == "replay"


def test_a_long_number_that_changes_is_named_by_its_beginning() -> None:
    held = [_LONG]
    trainer = _replaying(lambda model, batch: _loss(model, batch) + 0 * (held[0] & 1))
    held[0] += 1
    with pytest.raises(GuardDriftError, match=r"0x1000.*characters") as caught:
        trainer.train_step(_batch(4))
    assert len(str(caught.value)) < 2000


def test_a_batch_may_hold_a_long_number() -> None:
    trainer = Trainer(TrainStep(model := nn.Linear(6, 2), _loss, adamw(model.parameters())), "replay", max_plans=1)
    trainer.train_step({**_batch(0), "mask": _LONG})
    with pytest.raises(PlanStormError, match="mask"):
        trainer.train_step({**_batch(1), "mask": _LONG + 1})


class _Raising:
    def __init__(self, what: str) -> None:
        self.what = what

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("what"):
            raise ArithmeticError(f"no {name}")
        return object.__getattribute__(self, name)


class _Shy:
    """Raises where it is compared, spelled, or asked for what it lacks."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("compared")

    def __repr__(self) -> str:
        raise ArithmeticError("spelled")

    def __getattr__(self, name: str) -> Any:
        raise ArithmeticError(f"no {name}")


class _ShyNumber(int):
    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("compared")

    def __repr__(self) -> str:
        raise ArithmeticError("spelled")

    __hash__ = int.__hash__
    __int__ = __index__ = __repr__  # type: ignore[assignment]


@pytest.mark.parametrize("what", ["__class__", "__dict__"])
def test_an_object_that_raises_when_it_is_looked_at_is_refused_with_its_line(what: str) -> None:
    held = _Raising(what)
    with pytest.raises(GuardDriftError, match=rf"__getattribute__ at test_plain_facts\.py:\d+: it raises ArithmeticError \(no {what}\)"):
        _replaying(lambda model, batch: _loss(model, batch) + 0 * (held is None))


def test_an_object_that_begins_to_raise_is_refused_too() -> None:
    held = _Raising("")
    trainer = _replaying(lambda model, batch: _loss(model, batch) + 0 * (held is None))
    object.__getattribute__(held, "__dict__")["what"] = "__class__"
    _assert_refused(trainer, "it raises ArithmeticError")


def test_a_weak_reference_whose_object_is_gone_is_refused() -> None:
    held = weakref.proxy(_Key())
    with pytest.raises(GuardDriftError, match=r"weakref\.proxy: it raises ReferenceError"):
        _replaying(lambda model, batch: _loss(model, batch) + 0 * (held is None))


@pytest.mark.parametrize("shy", [_Shy(), _ShyNumber(3)], ids=["object", "number"])
def test_what_raises_where_no_guard_asks_is_taken(shy: Any) -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        held = shy  # a local variable, whose numbers are taken down
        return _loss(model, batch) + 0 * (held is None)

    assert _replaying(loss_fn, of_module=[shy]).last_action == "replay"
