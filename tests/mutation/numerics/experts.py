"""Planted bugs in who takes experts out: in the measure, in the choice, in what follows of it.

The modifier proves by an exchange of experts that nothing is left out, and tries the routers; both are switched off with each bug, so that
the catalogue alone has to see it.
"""

from __future__ import annotations

from harness.mutants.patches import CodeMutant, Edit, Mutant, bug

_MEASURE = "compressor.algorithms.pruning.reap:"
_REFIT = "compressor.algorithms.pruning.refit:"
_FIT = "compressor.modifiers.pruning.expert_refit:"
_COUNT = "compressor.modifiers.pruning.expert_count:"
_REAP = "compressor.modifiers.pruning.reap:"
_CRITERION = "expert_pruner.criterion"
_UNUSED = "expert_pruner.unused_experts"
_REFITTED = "expert_pruner.refitted"
_SMALLER = "expert_pruner.smaller_model"
_GUARDS = (
    Edit(_COUNT + "num_groups", "if off[layer] <= _MOST:", "if off[layer] <= 1e30:"),
    Edit(_COUNT + "try_routing", "if stray:", "if stray and count.fewer < 0:"),
)


def _bug(name: str, kind: str, wrong: str, killer: str, edit: Edit, raises: str = "") -> CodeMutant:
    return bug(name, kind, wrong, killer, edit, *_GUARDS, raises=raises)


EXPERT_MUTANTS: tuple[Mutant, ...] = (
    _bug("router_weight_forgotten", "saliency", "outputs count by their size alone, however little the router makes of them", _CRITERION,
         Edit(_MEASURE + "ExpertSaliency.add", "weights_N.double().abs() * outputs", "(weights_N.double().abs() * 0 + 1) * outputs")),
    _bug("sum_for_the_mean", "saliency", "experts count by how many tokens they get", _CRITERION,
         Edit(_MEASURE + "ExpertSaliency.value", "self._sum_E / self.num_tokens_E.clamp_min(1)", "self._sum_E / self.num_tokens_E.sum()")),
    _bug("squares_for_norms", "saliency", "a few large outputs outweigh all others", _CRITERION,
         Edit(_MEASURE + "ExpertSaliency.add", ".norm(dim=-1).double()", ".square().sum(-1).square().double()")),
    _bug("last_batch_only", "saliency", "each call forgets what came before it", _CRITERION,
         Edit(_MEASURE + "ExpertSaliency.add", "self._sum_E[expert] += float(added.sum())", "self._sum_E[expert] = float(added.sum())")),
    _bug("best_experts_go", "choice", "those that matter most go", _CRITERION,
         Edit(_MEASURE + "kept_experts", "sort(dim=-1, stable=True)", "sort(dim=-1, stable=True, descending=True)")),
    _bug("every_layer_like_the_first", "choice", "the experts that the first layer keeps are kept everywhere", _CRITERION,
         Edit(_REAP + "REAPPruningModifier.on_initialize", "kept_experts(value_E, dropped, groups) for layer, value_E",
              "kept_experts(next(iter(values.values())), dropped, groups) for layer, value_E")),
    _bug("slots_of_the_wrong_expert", "saliency", "an expert is weighted by what the router gives the others", _CRITERION,
         Edit(_COUNT + "experts_seen", 'hits = routing["top_k_index"][rows] == index', 'hits = routing["top_k_index"][rows] != index')),
    _bug("router_keeps_the_first_rows", "structure", "routers keep their first rows, whoever stays", _UNUSED,
         Edit(_COUNT + "choose_experts", "torch.tensor(list(kept[layer]), dtype", "torch.tensor(range(len(kept[layer])), dtype")),
    _bug("buffers_forgotten", "structure", "a bias that is a buffer keeps the places of experts that are gone", _CRITERION,
         Edit(_COUNT + "_tensors", "**dict(model.named_buffers(remove_duplicate=False))", "**{}"), raises="ModelError"),
    _bug("config_not_told", "structure", "the config goes on to count all experts", _SMALLER,
         Edit(_COUNT + "choose_experts", "state.set_setting(count.holder(state.model.config), count.path[-1], number)",
              "count.holder(state.model.config)"), raises="ModelError"),
    bug("refused_and_changed", "structure", "a model whose routers choose too many is refused without the experts that would have gone",
        "expert_pruner.too_few",
        Edit(_COUNT + "try_routing", "    finally:\n        state.restore_originals()",
             "    except ZeroDivisionError:\n        raise\n    state.restore_originals()"),
        Edit(_COUNT + "check_enough", "value > count.fewer", "value < 0")),  # which refuses first what a known setting says
    _bug("padding_counts", "saliency", "tokens that are padding count like any other", "expert_pruner.padding",
         Edit(_REAP + "_real", "weights_N, outputs_NC = weights_N[real_N], outputs_NC[real_N]", "real_N = real_N")),
    _bug("steps_the_wrong_way", "refit", "weights move away from what is missing", _REFITTED,
         Edit(_REFIT + "refit", "moved[place] += step_CD", "moved[place] -= step_CD")),
    _bug("what_is_missing_is_not_updated", "refit", "every expert makes good for all that is missing, one after another", _REFITTED,
         Edit(_REFIT + "refit", "missing_NC[tokens.rows_n] -= tokens.inputs_nD @ step_CD.T", "missing_NC.mul_(1)")),
    _bug("unweighted_inputs", "refit", "experts are fitted as if the router gave each all of it", _REFITTED,
         Edit(_FIT + "_sent", "inner[index] * routing", "inner[index] + 0 * routing")),
    _bug("fitted_to_other_tokens", "refit", "an expert is fitted to what is missing of the first tokens", _REFITTED,
         Edit(_REFIT + "refit", "@ missing_NC[tokens.rows_n]", "@ missing_NC[: len(tokens.rows_n)]")),
)  # fmt: skip
