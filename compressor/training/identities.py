"""A quick look at everything the guards watch: the same objects at the same addresses cannot mean another step.

Naming every tensor and every fact takes as long as replaying a small model. So the guards first compare objects by identity, which is done
without a line of Python per attribute, and only where one differs do they compare by name and value. The objects are held, so that no
other one can take over an identity.
"""

from __future__ import annotations

import operator
from itertools import chain

from torch import Tensor, nn

from compressor.training.facts import settings
from compressor.training.held import TABLES, classes, containers, other_modules
from compressor.training.reached import variables
from compressor.training.step import HasTensors, TrainStep


class Identities:
    """The objects of a step at one moment.

    Args:
        step: the step; not changed.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        # A module or parameter that comes or goes changes a table of one that is watched.
        tables = [table for module in (*step.model.modules(), *other_modules(step).values()) for table in _tables(module)]
        self._parameters = list(step.parameters().values())
        self._states = [step.optimizer.state.get(parameter, {}) for group in step.optimizer.param_groups for parameter in group["params"]]
        optimizer = step.optimizer
        own = (optimizer.__dict__, optimizer.state, optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        lists = [optimizer.param_groups] + [group["params"] for group in step.optimizer.param_groups]
        self._views = [table.values() for table in (*tables, *step.optimizer.param_groups, *self._states, *own)] + lists
        self._held = containers(step)
        self._views += [held.values() for held in self._held] + [content.values() for content in classes(step).values()]
        self._filled = [view for view in self._views if view]
        self._own_tensors = _tensors(step)
        self._getters = [getter for _, getter in variables(step, with_modules=True)]
        self._seen = self._look()

    def unchanged(self) -> bool:
        """Say whether every object of the step is the very same one, at the same address.

        Returns:
            True when nothing at all was exchanged.
        """
        (objects, numbers, values), (old_objects, old_numbers, old_values) = self._look(), self._seen
        if numbers != old_numbers or values != old_values or len(objects) != len(old_objects):
            return False
        return all(map(operator.is_, objects, old_objects))

    def _look(self) -> tuple[list[object], list[int], list[object]]:
        """Collect objects, sizes of tables and addresses, and what is compared by value."""
        step, parameters = self._step, self._parameters
        objects: list[object] = list(chain.from_iterable(self._filled))
        gradients = [parameter.grad for parameter in parameters]
        objects += gradients
        objects += [parameter.requires_grad for parameter in parameters]
        for parameter in parameters:
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                objects += _hooks(parameter)
        for modifier in step.modifiers:
            if isinstance(modifier, HasTensors):
                objects += modifier.training_tensors().values()
        numbers = [*map(len, self._views), *map(Tensor.data_ptr, self._own_tensors)]
        numbers += [gradient.data_ptr() for gradient in gradients if gradient is not None]
        objects += [getter() for getter in self._getters]
        return objects, numbers, [value for _, value in settings(step)]


def _tables(module: nn.Module) -> list[dict[str, object]]:
    return [module.__dict__, *(module.__dict__[name] for name in TABLES)]


def _tensors(step: TrainStep) -> list[Tensor]:
    """List every tensor but the gradients; whoever replaces one replaces an object that is watched."""
    others = [tensor for name, tensor in step.tensors().items() if not name.startswith(("grad:", "param:"))]
    return others + list(step.parameters().values())


def _hooks(parameter: Tensor) -> list[object]:
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [*(parameter._backward_hooks or {}).values(), "after", *(after or {}).values()]
