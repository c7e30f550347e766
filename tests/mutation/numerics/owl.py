"""Planted bugs in the shares of zeros that layers get by their outliers (OWL), against its goldens."""

from __future__ import annotations

from harness.mutants.patches import Edit, Mutant, bug

_SHARE = "compressor.algorithms.pruning.wanda:outlier_share"
_LAYERS = "compressor.algorithms.pruning.wanda:layer_sparsities"
_MODEL = "compressor.modifiers.pruning.calibrated:CalibratedPruningModifier.share_by_outliers"
_GROUPS = "compressor.modifiers.pruning.calibrated:_layers"
_GOLDEN, _OF_A_MODEL = "golden OWL", "golden OWL of a model"

OWL_MUTANTS: tuple[Mutant, ...] = (
    bug("outliers_lose_more", "OWL", "layers with more outliers get more zeros", _GOLDEN,
        Edit(_LAYERS, "sparsity - one + by", "sparsity + one - by")),
    bug("layers_alike", "OWL", "the mean over layers does not know their sizes", _GOLDEN,
        Edit(_LAYERS, "one * size for", "sum(sizes_L) / len(sizes_L) * one for")),
    bug("outliers_by_the_sum", "OWL", "a score is held against the sum of all", _GOLDEN,
        Edit(_SHARE, "part > multiple * mean", "part > multiple * mean * total")),
    bug("not_centred", "OWL", "layers give up zeros and none takes them", _GOLDEN,
        Edit(_LAYERS, "sparsity - one + by", "sparsity - one")),
    bug("spread_twice", "OWL", "shares are multiplied by lambda once more", _GOLDEN,
        Edit(_LAYERS, "2 * spread * (share", "2 * spread * spread * (share")),
    bug("spread_one_way", "OWL", "shares lie within one lambda, not two", _GOLDEN,
        Edit(_LAYERS, "2 * spread * (share", "spread * (share")),
    bug("by_the_highest_alone", "OWL", "the layer with fewest outliers is not where shares begin", _GOLDEN,
        Edit(_LAYERS, "(share - low) / (high - low)", "share / high")),
    bug("mean_of_each_matrix", "OWL", "a score is held against the mean of its own matrix", _GOLDEN,
        Edit(_SHARE, "multiple * mean)", "multiple * part.mean())")),
    bug("mean_of_means", "OWL", "matrices of a layer count alike, whatever their sizes", _OF_A_MODEL,
        Edit(_SHARE, "sum(float(part.sum(dtype=torch.float64)) for part in scores_of_layer) / total",
             "sum(float(part.mean(dtype=torch.float64)) for part in scores_of_layer) / len(scores_of_layer)")),
    bug("cut_off_at_the_ends", "OWL", "what a layer cannot lose stays everywhere", _GOLDEN,
        Edit(_LAYERS, "if max(above) - by > sparsity or by - min(above) > 1 - sparsity:", "if False:")),
    bug("outliers_of_weights", "OWL", "outliers are those of the weights, whatever flows in", _OF_A_MODEL,
        Edit(_MODEL, "squares[name].value(), name)", "squares[name].value() ** 0, name)")),
    bug("modules_counted", "OWL", "a layer counts by how many matrices it has", _OF_A_MODEL,
        Edit(_MODEL, "sizes = [sum(weight_rows(self._modules[name]).numel() for", "sizes = [sum(1 for")),
    bug("first_matrix_for_all", "OWL", "the first matrix of a layer alone gets its share", _OF_A_MODEL,
        Edit(_MODEL, "dict.fromkeys(names, share)", "{names[0]: share}")),
    bug("each_matrix_a_layer", "OWL", "shares are drawn up for matrices, not for layers", _OF_A_MODEL,
        Edit(_GROUPS, '".".join(parts[: number + 1])', '".".join(parts)')),
)  # fmt: skip
