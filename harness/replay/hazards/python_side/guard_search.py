"""Hazards of what the guards find: a factor of the loss is kept in one place after the other, and changed before step 6."""

from __future__ import annotations

import array
import collections
import configparser
import contextvars
import enum
import functools
import importlib
import operator
import queue
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from compressor.errors import GuardDriftError
from compressor.training import Trainer, TrainStep
from harness.replay.equivalence.run import Subject
from harness.replay.hazards.building_blocks import (
    NUMBERS,
    Kept,
    Net,
    Row,
    at,
    classify,
    default_optimizer,
    kept_in,
    nested,
    put,
    write_module,
)
from harness.replay.hazards.registry import Hazard


def _in_model(make: Callable[[], tuple[type[Net], Callable[[Any], object]]]) -> Callable[[], Subject]:
    def stage() -> Subject:
        kind, write = make()
        write(1.0)
        model = kind()
        step = TrainStep(model, classify, default_optimizer(model.parameters()))
        return Subject(Trainer(step), at(6, lambda trainer: write(2.0)))

    return stage


def _class_list() -> tuple[type[Net], Callable[[Any], object]]:
    class Scaled(Net):
        table: ClassVar = [1.0]

        def middle(self, h: Tensor) -> Tensor:
            return h * self.table[0]

    return Scaled, lambda value: put(Scaled.table, 0, value)


def _class_dict() -> tuple[type[Net], Callable[[Any], object]]:
    class Scaled(Net):
        table: ClassVar = {"inner": {"factor": 1.0}}

        def middle(self, h: Tensor) -> Tensor:
            return h * type(self).table["inner"]["factor"]

    return Scaled, lambda value: Scaled.table["inner"].update(factor=value)


def _mixin_list() -> tuple[type[Net], Callable[[Any], object]]:
    class Mixin:
        table: ClassVar = [1.0]

        def scale(self, h: Tensor) -> Tensor:
            return h * self.table[0]

    class Scaled(Mixin, Net):
        def middle(self, h: Tensor) -> Tensor:
            return self.scale(h)

    return Scaled, lambda value: put(Mixin.table, 0, value)


def _method_of_class() -> tuple[type[Net], Callable[[Any], object]]:
    class Scaled(Net):
        factor = 1.0

        @classmethod
        def scale(cls) -> float:
            return cls.factor * NUMBERS["of_class"]

        @property
        def doubled(self) -> float:
            return 2 * self.scale()

        def middle(self, h: Tensor) -> Tensor:
            return h * self.doubled

    return Scaled, lambda value: NUMBERS.update(of_class=value)


def _import() -> Kept:
    def read() -> Any:
        import harness_replay_hazards_settings_of_a_run as settings  # type: ignore[import-not-found]

        return settings.factor

    return read, write_module


def _from_import() -> Kept:
    def read() -> Any:
        from harness_replay_hazards_settings_of_a_run import factor

        return factor

    return read, write_module


def _import_module() -> Kept:
    return lambda: importlib.import_module("harness_replay_hazards_settings_of_a_run").factor, write_module


def _sys_modules() -> Kept:
    return lambda: sys.modules["harness_replay_hazards_settings_of_a_run"].factor, write_module


def _singleton() -> Kept:
    class Config:
        _instance: Config | None = None
        factor = 1.0

        @classmethod
        def get(cls) -> Config:
            cls._instance = cls._instance or cls()
            return cls._instance

    return lambda: Config.get().factor, lambda value: setattr(Config.get(), "factor", value)


def _backward() -> Subject:
    table = {"factor": 1.0}

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * table["factor"]

    class Scaled(Net):
        def middle(self, h: Tensor) -> Tensor:
            return Scale.apply(h)

    model = Scaled()
    step = TrainStep(model, classify, default_optimizer(model.parameters()))
    return Subject(Trainer(step), at(6, lambda trainer: table.update(factor=2.0)))


def _proxy() -> Kept:
    table: dict[str, Any] = {}
    view = types.MappingProxyType(table)
    return lambda: view["factor"], lambda value: table.update(factor=value)


def _globals() -> Kept:
    return lambda: globals()["NUMBERS"]["global"], lambda value: NUMBERS.update({"global": value})


_FACTOR: Any = 1.0


def _globals_number() -> Kept:
    def write(value: Any) -> None:
        global _FACTOR
        _FACTOR = value

    return lambda: globals()["_FACTOR"], write


def _vars() -> Kept:
    held = types.SimpleNamespace(inner=types.SimpleNamespace(factor=1.0))
    return lambda: vars(held.inner)["factor"], lambda value: setattr(held.inner, "factor", value)


def _thread_local() -> Kept:
    local = threading.local()
    return lambda: local.factor, lambda value: setattr(local, "factor", value)


def _python_array() -> Kept:
    values = array.array("d", [1.0])
    return lambda: values[0], lambda value: put(values, 0, value)


def _registry() -> Kept:
    registry: dict[str, Callable[[], Any]] = {}
    return lambda: registry["scale"](), lambda value: registry.update(scale=lambda: value)


def _decorated() -> Kept:
    settings = [1.0]

    def scaled(function: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(function)
        def wrapper() -> Any:
            return function() * settings[0]

        return wrapper

    return scaled(lambda: 1.0), lambda value: put(settings, 0, value)


class _Level(enum.Enum):
    HIGH = "high"


def _enumerated() -> Kept:
    return lambda: _Level.HIGH.factor, lambda value: setattr(_Level.HIGH, "factor", value)  # type: ignore[attr-defined]


class _Pair(NamedTuple):
    name: str
    values: list[Any]


def _named_tuple() -> Kept:
    pair = _Pair("factor", [1.0])
    return lambda: pair.values[0], lambda value: put(pair.values, 0, value)


def _user_dict() -> Kept:
    table: Any = collections.UserDict()
    return lambda: table["factor"], lambda value: table.update(factor=value)


def _chained() -> Kept:
    base: dict[str, Any] = {}
    chain = collections.ChainMap({}, base)
    return lambda: chain["factor"], lambda value: base.update(factor=value)


def _parsed() -> Kept:
    parser = configparser.ConfigParser()
    parser.read_string("[run]\nfactor = 1.0")
    return lambda: parser.getfloat("run", "factor"), lambda value: parser.set("run", "factor", str(value))


def _queued() -> Kept:
    waiting: queue.Queue[Any] = queue.Queue()
    return lambda: waiting.queue[-1], waiting.put


def _patched_method() -> Kept:
    class Base:
        def scale(self) -> Any:
            return 1.0

    class Helper(Base):
        pass

    helper = Helper()
    return lambda: helper.scale(), lambda value: setattr(Base, "scale", lambda self: value)


def _partial() -> Kept:
    held: dict[str, Any] = {}
    read = functools.partial(functools.partial(operator.getitem, held), "factor")
    return read, lambda value: held.update(factor=value)


def _generator_frame() -> Kept:
    held = [1.0]

    def values() -> Any:
        while True:
            yield held[0]

    def read() -> Any:
        return next(values())

    return read, lambda value: put(held, 0, value)


def _in_comprehension() -> Kept:
    held = {"factors": [1.0]}
    return lambda: sum(one for group in held.values() for one in group), lambda value: put(held["factors"], 0, value)


def _function_attribute() -> Kept:
    def read() -> Any:
        return read.factor  # type: ignore[attr-defined]

    return read, lambda value: setattr(read, "factor", value)


def _defaults() -> Kept:
    def read(factor: Any = 1.0) -> Any:
        return factor

    return read, lambda value: setattr(read, "__defaults__", (value,))


def _code() -> Kept:
    def read() -> Any:
        return 1.0

    def other() -> Any:
        return 2.0

    return read, lambda value: setattr(read, "__code__", other.__code__) if value == 2.0 else None


def _other_class() -> Kept:
    class One:
        factor = 1.0

    class Two(One):
        factor = 2.0

    held = One()
    return lambda: held.factor, lambda value: setattr(held, "__class__", Two) if value == 2.0 else None


def _on_parameter() -> Subject:
    class Scaled(Net):
        def middle(self, h: Tensor) -> Tensor:
            weight: Any = self.last.weight
            return h * weight.factor

    model = Scaled()
    weight: Any = model.last.weight
    weight.factor = 1.0
    step = TrainStep(model, classify, default_optimizer(model.parameters()))
    return Subject(Trainer(step), at(6, lambda trainer: setattr(weight, "factor", 2.0)))


def _metaclass() -> Kept:
    class Meta(type):
        factor = 1.0

    class Config(metaclass=Meta):
        pass

    return lambda: Config.factor, lambda value: setattr(Meta, "factor", value)


def _context_variable() -> Kept:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("factor")
    return variable.get, variable.set


class _Descriptor:
    value: Any = 1.0

    def __get__(self, holder: object, owner: type | None = None) -> Any:
        return NUMBERS["descriptor"]


def _descriptor() -> Kept:
    class Config:
        factor = _Descriptor()

    config = Config()
    return lambda: config.factor, lambda value: NUMBERS.update(descriptor=value)


def _dynamic() -> Kept:
    class Config:
        def __getattr__(self, name: str) -> Any:
            return NUMBERS[name]

    config = Config()
    return lambda: config.dynamic, lambda value: NUMBERS.update(dynamic=value)


def _operators() -> Kept:
    class Config:
        def __getitem__(self, name: str) -> Any:
            return NUMBERS[name]

        def __len__(self) -> int:
            return int(NUMBERS["operators"])

    config = Config()
    return lambda: config["operators"] * len(config), lambda value: NUMBERS.update(operators=value)


@dataclass(slots=True)
class _Slotted:
    factor: Any = 1.0


def _slots_in_list() -> Kept:
    held = [_Slotted()]
    return lambda: held[0].factor, lambda value: setattr(held[0], "factor", value)


def _singleton_new() -> Kept:
    class Config:
        _instance: Any = None
        factor = 1.0

        def __new__(cls) -> Config:
            if cls._instance is None:
                cls._instance = super().__new__(cls)
            return cls._instance

    return lambda: Config().factor, lambda value: setattr(Config(), "factor", value)


def _tensor_moved() -> Kept:
    factor = torch.ones(())
    return lambda: factor, lambda value: setattr(factor, "data", torch.tensor(value))


def _enum_by_value() -> Kept:
    class Kind(enum.Enum):
        ONE = 1

    Kind.ONE.factor = 1.0  # type: ignore[attr-defined]
    return lambda: Kind(1).factor, lambda value: setattr(Kind(1), "factor", value)  # type: ignore[attr-defined]


def _annotated() -> Kept:
    def function() -> None: ...

    function.__annotations__["factor"] = 1.0
    return lambda: function.__annotations__["factor"], lambda value: function.__annotations__.update(factor=value)


def _list_attribute() -> Kept:
    class Listed(list[float]):
        factor: Any = 1.0

    held = Listed([0.0])
    return lambda: held.factor, lambda value: setattr(held, "factor", value)


_SEEN: tuple[Row, ...] = (
    ("parameter_attribute", "an attribute of a parameter", _on_parameter),
    ("class_list", "a list on the class of a module", _in_model(_class_list)),
    ("class_dict", "a dict in a dict on the class of a module", _in_model(_class_dict)),
    ("mixin_list", "a list on a mixin", _in_model(_mixin_list)),
    ("class_method", "a class method behind a property", _in_model(_method_of_class)),
    ("import_inside", "a module that the function imports", kept_in(_import)),
    ("from_import_inside", "a name that the function imports", kept_in(_from_import)),
    ("import_module", "a module by importlib", kept_in(_import_module)),
    ("sys_modules", "a module in sys.modules", kept_in(_sys_modules)),
    ("singleton", "the one object that a class method gives", kept_in(_singleton)),
    ("autograd_backward", "a dict that the backward of an autograd function reads", _backward),
    ("mapping_proxy", "a view of a dict", kept_in(_proxy)),
    ("globals_dict", "a dict in globals()", kept_in(_globals)),
    ("globals_number", "a number in globals()", kept_in(_globals_number)),
    ("vars_of_object", "a number in vars()", kept_in(_vars)),
    ("thread_local", "a thread-local number", kept_in(_thread_local)),
    ("array_of_numbers", "an array of Python", kept_in(_python_array)),
    ("nested_3", "a dict within three", kept_in(nested(3))),
    ("registered", "a function in a dict", kept_in(_registry)),
    ("decorated", "a list that a decorator closes over", kept_in(_decorated)),
    ("enum_attribute", "an attribute of a member of an enum", kept_in(_enumerated)),
    ("named_tuple", "a list in a named tuple", kept_in(_named_tuple)),
    ("user_dict", "a UserDict", kept_in(_user_dict)),
    ("chain_map", "the second dict of a ChainMap", kept_in(_chained)),
    ("config_parser", "a value of a ConfigParser", kept_in(_parsed)),
    ("queue_content", "the end of a queue", kept_in(_queued)),
    ("base_method", "a method of a helper's base class", kept_in(_patched_method)),
    ("partial_of_partial", "a dict bound by partial functions", kept_in(_partial)),
    ("generator_frame", "a list that a generator reads", kept_in(_generator_frame)),
    ("comprehension", "lists in a dict, in a comprehension", kept_in(_in_comprehension)),
    ("function_attribute", "an attribute of a function", kept_in(_function_attribute)),
    ("function_defaults", "the defaults of a function", kept_in(_defaults)),
    ("function_code", "the code of a function", kept_in(_code)),
    ("object_class", "the class of an object", kept_in(_other_class)),
    ("metaclass", "an attribute of a metaclass", kept_in(_metaclass)),
    ("context_value", "a context variable, by its bound method", kept_in(_context_variable)),
    ("descriptor", "a descriptor that reads a global", kept_in(_descriptor)),
    ("dynamic_attribute", "an attribute by __getattr__", kept_in(_dynamic)),
    ("operators_of_object", "an object's own [] and len()", kept_in(_operators)),
    ("slots_in_list", "an object with slots in a list", kept_in(_slots_in_list)),
    ("singleton_new", "the one object that __new__ gives", kept_in(_singleton_new)),
    ("tensor_data", "a tensor whose data are exchanged", kept_in(_tensor_moved)),
    ("enum_by_value", "an attribute of a member of an enum, by its value", kept_in(_enum_by_value)),
    ("annotations", "the annotations of a function", kept_in(_annotated)),
    ("list_attribute", "an attribute of a list of one's own class", kept_in(_list_attribute)),
)
_SOURCE = "compressor/training/README.md: what the guards see"
HAZARDS: tuple[Hazard, ...] = tuple(Hazard(name, what, stage, GuardDriftError, "since the capture", _SOURCE) for name, what, stage in _SEEN)
