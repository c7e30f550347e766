"""Planted bugs in captured training steps: a guard that sleeps, a proof that forgets, a tape that repeats something else; against the
hazards of `harness replay hazards`, which then are silent or no longer refused by name.

A bug whose only effect is a slower step, or that another layer makes up for (the proof repeats what guards know), is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from harness.mutants.patches import Edit, Mutant, Table, bug

_TRAINING = "compressor.training."


def _edit(kind: str, name: str, wrong: str, killer: str, where: str, old: str, new: str) -> Mutant:
    return bug(name, kind, wrong, killer if killer.startswith("plan.") else f"hazards.{killer}", Edit(_TRAINING + where, old, new))


def _emptied(kind: str, name: str, wrong: str, killer: str, where: str) -> Mutant:
    return bug(name, kind, wrong, f"hazards.{killer}", Table(_TRAINING + where, lambda table: type(table)()))


_guard, _record, _tape, _key, _state = (partial(_edit, kind) for kind in ("guards", "recorder", "tape", "keys", "state"))
MUTANTS: Sequence[Mutant] = (
    _guard("addresses_ignored", "addresses are not compared", "parameter_replaced", "replay.plan:_addresses", "t.data_ptr()", "0"),
    _guard(
        "facts_ignored", "a changed fact is not refused", "weight_decay", "replay.plan:Plan.guard", "if changed is not None:", "if False:"
    ),
    _guard(
        "identities_blind",
        "the quick look always says that nothing changed",
        "eval_of_a_part",
        "replay.plan:Plan.guard",
        "if self._identities.unchanged():",
        "if True:",
    ),
    _guard(
        "containers_unseen",
        "lists, dicts and objects are not looked into",
        "swapped_in_dict",
        "guards.containers:containers",
        "return list(search.found.values())",
        "return []",
    ),
    _guard(
        "classes_unseen", "classes of modules are not looked at", "patched_class", "guards.containers:classes", "return found", "return {}"
    ),
    _guard(
        "teachers_unseen",
        "modules beside the model are not looked at",
        "teacher_eval",
        "guards.python_state:other_modules",
        "return {name: module for module, name in _reached(step)[1].others.items()}",
        "return {}",
    ),
    _guard(
        "modifiers_unseen",
        "modifiers of one's own are not looked at",
        "number_of_modifier",
        "guards.python_state:_roots_beside",
        "if not isinstance(modifier, HasPlanKey) and",
        "if False and",
    ),
    _guard("host_unwatched", "a step may change the host", "counter", "replay.plan:_watch", "if changed is not None:", "if False:"),
    _guard(
        "moves_unwatched",
        "a step may give a tensor another storage",
        "replaced_buffer",
        "replay.plan:_check_moved",
        "if old.get(name) == new.get(name):",
        "if True:",
    ),
    _guard(
        "compiled_allowed",
        "compiled modules are not refused",
        "compiled_module",
        "replay.plan:_refuse_compiled",
        'if hasattr(module, "_orig_mod") or',
        "if False and",
    ),
    _record(
        "seeds_unseen",
        "operators that draw are not known as such",
        "dropout",
        "capture.recorder:Recorder._watch",
        "seeded = torch.Tag.nondeterministic_seeded in func.tags",
        "seeded = False",
    ),
    _record(
        "generator_unwatched",
        "the generator is not watched",
        "manual_seed",
        "step.digests:rng_digest",
        "torch.get_rng_state()",
        "torch.zeros(1)",
    ),
    _record(
        "dynamic_shapes_allowed",
        "shapes may depend on data",
        "nonzero",
        "capture.recorder:Recorder._refuse",
        "if torch.Tag.dynamic_output_shape in func.tags and",
        "if False and",
    ),
    _record(
        "layouts_allowed",
        "sparse tensors are recorded",
        "sparse_gradients",
        "capture.recorder:_refuse_layout",
        "if tensor.layout is not torch.strided or",
        "if False and",
    ),
    _record(
        "outside_written",
        "tensors that nobody registered may be written",
        "written_global",
        "capture.recorder:Recorder._check_writes",
        'if name.startswith("outside:"):',
        "if False:",
    ),
    _record(
        "inputs_written",
        "the caller's batch may be written",
        "input_written",
        "capture.recorder:Recorder._check_writes",
        'if name.startswith("in:"):',
        "if False:",
    ),
    _record(
        "draws_allowed",
        "draws from Python's generators are not refused",
        "python_random",
        "guards.host_reads:watching_host",
        "if moved is not None:",
        "if False:",
    ),
    _record(
        "reads_unseen",
        "tolist and numpy are not seen",
        "tolist",
        "guards.host_reads:_Reads.__torch_function__",
        "if func in _READS:",
        "if False:",
    ),
    _emptied("capture.recorder", "resizing_allowed", "storages may change", "resized", "capture.recorder:_STORAGE_CHANGES"),
    _emptied(
        "capture.recorder",
        "batch_norm_pure",
        "batch norm is taken for one that writes nothing",
        "loose_statistics",
        "capture.operators:HIDDEN_WRITES",
    ),
    _record(
        "escapes_unseen",
        "what the step leaves behind is not looked for",
        "kept_activation",
        "replay.plan:_watch",
        "check_escapes(step, recorder, kept, result[1])",
        "pass",
    ),
    _tape(
        "grad_mode_forgotten",
        "an operator that asks for the grad mode does not get it",
        "lstm",
        "engines.tape:_under_grad_mode",
        "with torch.set_grad_enabled(enabled):",
        "with torch.set_grad_enabled(False):",
    ),
    _tape(
        "second_output_lost",
        "of several results only the first is copied",
        "lstm",
        "engines.tape:_link_copies",
        "for position, out in targets:",
        "for position, out in targets[:1]:",
    ),
    _tape(
        "loss_not_cloned",
        "the returned loss is the tape's own",
        "sgd",
        "replay.plan:Plan.__call__",
        "self.captured.loss.clone()",
        "self.captured.loss",
    ),
    _tape(
        "last_op_lost",
        "the last operator of a step is not repeated",
        "sgd",
        "engines.tape:Tape.replay",
        "for run in self._program:",
        "for run in self._program[:-1]:",
    ),
    _key(
        "bind_unchecked",
        "a batch of another shape is copied in",
        "plan.binds",
        "step.batch:InputBuffers.bind",
        "if key != self._key:",
        "if False:",
    ),
    _key("shapes_not_in_key", "shapes are not part of a plan's key", "one_row", "step.batch:_key_of", "tuple(leaf.shape)", "()"),
    _key(
        "strides_not_in_key",
        "strides are not part of a plan's key",
        "channels_last",
        "step.batch:_strides",
        "if tensor.is_contiguous():",
        "if True:",
    ),
    _key(
        "constants_not_in_key",
        "Python numbers of a batch are not part of a plan's key",
        "changing_number",
        "step.batch:_key_of",
        "(path, type(leaf).__name__, *_constant(leaf))",
        "(path, type(leaf).__name__)",
    ),
    _key(
        "modifiers_not_in_key",
        "modifiers are not part of a plan's key",
        "start_and_end",
        "step.step:TrainStep.plan_key",
        "for m in self.modifiers",
        "for m in ()",
    ),
    _key(
        "plans_unlimited",
        "the number of plans has no cap",
        "every_shape",
        "trainer:Trainer._record_of",
        "len(self._keys) >= self.max_plans",
        "False",
    ),
    _state(
        "generators_not_put_back",
        "a proof does not put generators back",
        "dropout",
        "step.snapshot:Snapshot.put_back",
        "self.rng.restore(generators)",
        "pass",
    ),
    _state(
        "optimizer_not_put_back",
        "a proof does not put the optimizer's state back",
        "adamw",
        "step.snapshot:Snapshot.put_back",
        "if name in self.tensors:",
        'if name in self.tensors and not name.startswith("opt."):',
    ),
    _state(
        "own_generators_unknown",
        "generators that modules hold are not put back",
        "own_generator",
        "guards.containers:own_generators",
        "return list(",
        "return [] and list(",
    ),
    _state(
        "buffers_unlisted",
        "buffers are not part of the state",
        "batch_norm",
        "step.step:TrainStep._tensors",
        "self.model.named_buffers()",
        "()",
    ),
    _state(
        "captures_uncompared",
        "a recorded step is not held against the eager one",
        "asks_for_capture",
        "trainer:Trainer._refusable",
        "if turn.rehearsed:",
        "if False:",
    ),
    _state(
        "numbers_drift",
        "signatures are compared without their numbers",
        "number_in_memory",
        "capture.signature:drift",
        "if list(first) == list(second):",
        'if [_NUMBER.sub("", a) for a in first] == [_NUMBER.sub("", b) for b in second]:',
    ),
    _state(
        "gradients_none",
        "gradients are set to None in every step",
        "sgd",
        "step.step:TrainStep.captured_part",
        "zero_grad(set_to_none=False)",
        "zero_grad(set_to_none=True)",
    ),
)
