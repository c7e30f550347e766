"""Planted bugs in hooks, in the shared state, and in recipes."""

from __future__ import annotations

from harness.mutants.patches import Edit, Mutant

_HOOKS = "compressor.lifecycle.hooks:HooksMixin."
_STATE = "compressor.lifecycle.state:State."
_RECIPE = "compressor.recipe.recipe:"
_BUILD = "compressor.recipe.build:Builder."
_SESSIONS = "machine.session"

HOOK_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "inner_exit_wakes",
        "hooks",
        "leaving an inner disable_hooks() wakes the hooks in the outer one",
        (Edit(_HOOKS + "disable_hooks", "self._num_disabled -= 1", "self._num_disabled = 0"),),
        "lifecycle.nested_contexts",
    ),
    Mutant(
        "contexts_in_order_only",
        "hooks",
        "each context restores what it found, so that contexts left out of order wake hooks too soon",
        (
            Edit(_HOOKS + "disable_hooks", "self._num_disabled += 1", "before, self._num_disabled = self._num_disabled, 1"),
            Edit(_HOOKS + "disable_hooks", "self._num_disabled -= 1", "self._num_disabled = before"),
        ),
        "lifecycle.nested_contexts",
    ),
    Mutant(
        "sleeps_on_after_an_error",
        "hooks",
        "leaving disable_hooks() by an exception leaves the hooks asleep",
        (Edit(_HOOKS + "disable_hooks", "finally:", "except ZeroDivisionError:\n        raise\n    else:"),),
        "lifecycle.nested_contexts",
    ),
    Mutant(
        "everybody_sleeps",
        "hooks",
        "disable_hooks() puts the hooks of every modifier of the process to sleep",
        (
            Edit(_HOOKS + "disable_hooks", "self._num_disabled += 1", "globals().setdefault('_asleep', []).append(1)"),
            Edit(_HOOKS + "disable_hooks", "self._num_disabled -= 1", "globals()['_asleep'].pop()"),
            Edit(_HOOKS + "register_hook", "if self._num_disabled else", "if globals().get('_asleep') else"),
        ),
        "lifecycle.hooks",
    ),
    Mutant(
        "hooks_never_sleep",
        "hooks",
        "disable_hooks() has no effect",
        (Edit(_HOOKS + "register_hook", "return None if self._num_disabled else", "return"),),
        "lifecycle.hooks",
    ),
    Mutant(
        "removed_in_the_books_only",
        "hooks",
        "remove_hooks() forgets its hooks without taking them off the modules",
        (Edit(_HOOKS + "remove_hooks", "    handle.remove()\n", "    pass\n"),),
        "lifecycle.completes",
    ),
    Mutant(
        "removes_all",
        "hooks",
        "removing one hook removes all of the modifier",
        (Edit(_HOOKS + "remove_hooks", "self._hook_handles if handles is None else handles", "self._hook_handles"),),
        "lifecycle.hooks",
    ),
    Mutant(
        "no_kwargs",
        "hooks",
        "with_kwargs is ignored",
        (Edit(_HOOKS + "register_hook", '"with_kwargs": with_kwargs', '"with_kwargs": False'),),
        "lifecycle.hooks",
    ),
    Mutant(
        "not_always",
        "hooks",
        "always_call is ignored",
        (Edit(_HOOKS + "register_hook", '"always_call": always_call', '"always_call": False'),),
        "lifecycle.hooks",
    ),
    Mutant(
        "latest_first",
        "hooks",
        "a new hook runs before those that are there",
        (Edit(_HOOKS + "register_hook", "register(call_unless_disabled,", "register(call_unless_disabled, prepend=True,"),),
        "lifecycle.hooks",
    ),
)

STATE_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "originals_not_kept",
        "state",
        "replace_module does not keep the original",
        (Edit(_STATE + "replace_module", "if self.keep_originals:", "if False:"),),
        "lifecycle.rolls_back",
    ),
    Mutant(
        "latest_original",
        "state",
        "a module that is replaced twice comes back as it was between the two",
        (Edit(_STATE + "replace_module", "self.originals.setdefault(name, old)", "self.originals[name] = old"),),
        _SESSIONS,
    ),
    Mutant(
        "replacement_trains",
        "state",
        "a module that comes in does not take over the training flag",
        (Edit(_STATE + "replace_module", "new.train(old.training)", "pass"),),
        "lifecycle.surroundings",
    ),
)

RECIPE_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "one_of_a_type",
        "recipe",
        "of two modifiers of one type in a group only the last is written",
        (Edit(_RECIPE + "_stage_data", "group and len({names[id(m)] for m in members}) == len(members)", "group"),),
        "lifecycle.recipe",
    ),
    Mutant(
        "settings_lost",
        "recipe",
        "the end of a modifier is not written",
        (Edit(_RECIPE + "_settings", "not in _FILLED_IN", "not in _FILLED_IN | {'end'}"),),
        "lifecycle.recipe",
    ),
    Mutant(
        "read_backwards",
        "recipe",
        "a list of modifiers is read from its end",
        (
            Edit(
                _BUILD + "_group",
                "value if isinstance(value, list | tuple) else [value]",
                "value[::-1] if isinstance(value, list | tuple) else [value]",
            ),
        ),
        "lifecycle.recipe",
    ),
    Mutant(
        "all_recipes_equal",
        "recipe",
        "modifiers of one class are equal whatever their settings",
        (Edit("compressor.lifecycle.modifier:Modifier.__eq__", "_settings(self) == _settings(other)", "True"),),
        "lifecycle.recipe",
    ),
    Mutant(
        "class_forgotten",
        "recipe",
        "a modifier is written under the name of its base class",
        (
            Edit(
                _RECIPE + "modifier_name",
                'f"{cls.__module__}:{cls.__qualname__}"',
                'f"{cls.__mro__[1].__module__}:{cls.__mro__[1].__qualname__}"',
            ),
        ),
        "lifecycle.recipe",
    ),
)
