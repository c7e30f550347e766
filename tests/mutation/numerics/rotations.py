"""Planted bugs in rotations: in the matrices, in what is folded and turned, and in what finds who writes and who reads.

The modifier itself compares outputs before and after; that is switched off with each bug, so that the catalogue alone has to see it.
"""

from __future__ import annotations

from harness.mutants.patches import CodeMutant, Edit, Mutant, bug

_TURNS = "compressor.mappings.turns:"
_BASIS = "compressor.mappings.basis:"
_MATRIX = "compressor.algorithms.rotations:"
_SPIN = "compressor.modifiers.transforms.spinquant:"
_ROTATING = "compressor.modifiers.transforms.rotating:"
_ONLINE = "compressor.nn.online_rotation:"
_FILES = "compressor.model.checkpoints.online:"
_QUIP = "compressor.modifiers.transforms.quip:QuIPModifier."
_FLOAT = "transform.float_output"
_SPREAD, _CHANGED = "transform.incoherent", "transform.not_vacuous"
_EVERY = "transform.every_architecture"
_GUARD = Edit(_ROTATING + "RotatingModifier.check_outputs", "if not difference <=", "if difference < 0 and not difference <=")


def _bug(name: str, kind: str, wrong: str, killer: str, edit: Edit) -> CodeMutant:
    return bug(name, kind, wrong, killer, edit, _GUARD)


ROTATION_MUTANTS: tuple[Mutant, ...] = (
    _bug("norm_not_folded", "turns", "the weight of a norm stays where it is and its readers get none", _FLOAT,
         Edit(_TURNS + "_folded", "return weight_RK * norm.weight_C.to", "return weight_RK * norm.weight_C.sign().to")),
    _bug("norm_not_neutral", "turns", "readers take the weight of a norm which keeps it", _FLOAT,
         Edit(_TURNS + "TurnPlan._neutral", "torch.full_like(norm.weight_C, 1.0 - norm.pair.offset)",
              "(norm.weight_C - norm.pair.offset)")),
    _bug("gemmas_one_folded", "turns", "a norm that multiplies by 1 + weight is set to one as if it did not", _EVERY,
         Edit(_TURNS + "TurnPlan._neutral", "1.0 - norm.pair.offset", "1.0")),
    _bug("readers_not_turned_back", "turns", "writers are turned and their readers are not", _FLOAT,
         Edit(_TURNS + "TurnPlan.tensors", "if name in turn.readers:", "if name in turn.writers and name in turn.readers:")),
    _bug("embedding_forgotten", "turns", "rows of embeddings stay as they were", _FLOAT,
         Edit(_TURNS + "_turned_output", "rotation.turn(weight_RK) if isinstance", "weight_RK if isinstance")),
    _bug("writers_bias_forgotten", "turns", "the bias of a layer that writes stays as it was", _EVERY,
         Edit(_TURNS + "TurnPlan.tensors", "bias_R = None if bias_R is None else turn.rotation.turn(bias_R)", "bias_R = bias_R")),
    _bug("norms_bias_lost", "turns", "the bias of a LayerNorm is set to zero and nobody takes it", _EVERY,
         Edit(_TURNS + "_folded", "bias_R + weight_RK @ norm.bias_C.to(weight_RK.dtype)", "bias_R + 0")),
    _bug("bias_through_the_folded_weight", "turns", "the bias of a norm passes through weights that hold its scale already", _EVERY,
         Edit(_TURNS + "_folded", "weight_RK @ norm.bias_C", "(weight_RK * norm.weight_C.to(weight_RK.dtype)) @ norm.bias_C")),
    _bug("folded_and_rounded", "turns", "a weight is rounded to bfloat16 between folding and turning", _FLOAT,
         Edit(_TURNS + "_folded", "return weight_RK * norm.weight_C.to(weight_RK.dtype),",
              "return (weight_RK * norm.weight_C.to(weight_RK.dtype)).bfloat16().to(weight_RK.dtype),")),
    _bug("layernorm_as_rmsnorm", "basis", "a norm that subtracts the mean gets a rotation that does not keep it", _EVERY,
         Edit(_BASIS + "_Search.keeps_mean", "return any(", "return 1 < sum(0 for _ in norms) or False and any(")),
    _bug("no_root_of_the_size", "rotations", "a Hadamard matrix is not divided by the root of its size", _FLOAT,
         Edit(_MATRIX + "make_rotation", "Rotation(tuple(factors), size,", "Rotation(tuple(factors), 1,")),
    _bug("readers_turned_the_other_way", "turns", "a layer that reads is turned by the transposed matrix", _FLOAT,
         Edit(_TURNS + "TurnPlan.tensors", "weight_RK = turn.rotation.turn(weight_RK)",
              "weight_RK = turn.rotation.turn(weight_RK, back=True)")),
    _bug("head_stays_tied", "spinquant", "the config goes on to say that head and embedding are tied", "transform.tied_weights",
         Edit(_SPIN + "_untie", 'state.set_setting(part, "tie_word_embeddings", False)', 'getattr(part, "tie_word_embeddings")')),
    _bug("heads_of_another_size", "spinquant", "values are turned across two heads at once", _FLOAT,
         Edit(_SPIN + "SpinQuantModifier._second", "rotation = known.rotation if known else self.rotation(size,",
              "rotation = known.rotation if known else self.rotation(size * 2,")),
    _bug("first_rotation_left_out", "spinquant", "R1 is asked for and hidden states are not turned", "transform.not_vacuous",
         Edit(_SPIN + "SpinQuantModifier.on_calibration_start", '"R1" in self.rotations', '"R1" not in self.rotations')),
    _bug("end_of_mlps_left_out", "spinquant", "R4 is asked for and nothing is turned", _FLOAT,
         Edit(_SPIN + "SpinQuantModifier.on_calibration_start", '"R4" in self.rotations', '"R4" not in self.rotations')),
    _bug("online_the_other_way", "online", "what a layer is handed or gives is turned by the transposed matrix", _FLOAT,
         Edit(_ONLINE + "OnlineRotation.turn", "back=self.back", "back=not self.back")),
    _bug("outputs_not_turned_back", "online", "outputs are turned a second time", _FLOAT,
         Edit(_ROTATING + "_hook", "back=bool(turn.writers)", "back=False")),
    _bug("inputs_not_turned", "online", "weights are turned and the forward knows nothing of it", _FLOAT,
         Edit(_ONLINE + "OnlineRotation.__call__", "return (self._turned_once(module, args[0]), *args[1:]), other", "return args, other")),
    _bug("online_in_the_layers_dtype", "online", "rotations of the forward are rounded to bfloat16", _FLOAT,
         Edit(_ONLINE + "OnlineRotation.turn", "x_ND.to(dtype)", "x_ND.bfloat16().to(dtype)")),
    _bug("stored_the_other_way", "files", "the matrix in the files is the transposed one", "transform.checkpoint",
         Edit(_FILES + "_stored", "matrix.T if rotation.back else matrix", "matrix if rotation.back else matrix.T")),
    _bug("outputs_left_out_of_files", "files", "of the files only the inputs are read", "transform.checkpoint",
         Edit(_FILES + "read_rotations", "if side is not None else ()", 'if side == "input" else ()')),
    _bug("last_layer_of_a_size", "QuIP", "of the layers of one size the last alone has its inputs turned", _SPREAD,
         Edit(_QUIP + "_turns", "readers=(*known.readers, name)", "readers=(name,)")),
    _bug("last_outputs_of_a_size", "QuIP", "of the layers of one size the last alone has its outputs turned", _SPREAD,
         Edit(_QUIP + "_turns", "writers=(*known.writers, name)", "writers=(name,)")),
    _bug("one_side_alone", "QuIP", "both sides are asked for and the second stays", _SPREAD,
         Edit(_QUIP + "on_calibration_start", "if side in self.rotations", "if side == self.rotations[0]")),
    _bug("both_sides_alike", "QuIP", "inputs and outputs of one size are turned by one rotation", _SPREAD,
         Edit(_QUIP + "_turns", 'state.seed + (side == "u")', "state.seed")),
    _bug("first_size_alone", "QuIP", "layers of another size than the first are not turned", _CHANGED,
         Edit(_QUIP + "_turns", "return list(turns.values())", "return list(turns.values())[:1]")),
    _bug("first_turn_alone", "QuIP", "of the rotations that were made one is used", _CHANGED,
         Edit(_QUIP + "on_calibration_start", "self.turn_online(state, turns, batch)", "self.turn_online(state, turns[:1], batch)")),
)  # fmt: skip
