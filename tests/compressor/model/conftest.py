"""Tiny random models, and layers quantized by rounding to nearest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from compressor.model.targets import resolve_targets
from compressor.nn import QuantizedLinear
from compressor.numerics import QuantizationScheme, make_observer, quantize, weight_qparams
from tests import tiny

VOCAB_SIZE = 96
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def make_model() -> Callable[..., nn.Module]:
    """Build `kind` with random bf16 weights; the same for the same seed."""

    def make(kind: str = "llama", *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: object) -> nn.Module:
        import transformers

        config_class, model_class = {
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
            "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
            "bert": (transformers.BertConfig, transformers.BertModel),
        }[kind]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            # Not `.to(dtype)`, which would round the rotary frequencies too: no folder holds those.
            model = model_class._from_config(config_class(**{**_SHAPE, "tie_word_embeddings": False, **config}), dtype=dtype).eval()
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    nn.init.normal_(parameter)
        return model

    return make


@pytest.fixture
def quantize_linears() -> Callable[..., dict[str, QuantizationScheme]]:
    """Replace the linear layers that the scheme targets, less `ignore`; return the scheme of each."""

    def replace(model: nn.Module, scheme: QuantizationScheme, ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, QuantizationScheme]:
        assert scheme.weights is not None
        schemes = {}
        for name, linear in resolve_targets(model, scheme.targets, ignore).items():
            weight = linear.weight.detach()
            qparams = weight_qparams(weight, scheme.weights)
            inputs = scheme.input_activations
            input_qparams = None
            if inputs is not None and not inputs.dynamic:
                observer = make_observer(inputs)
                observer.update(torch.linspace(-3, 4, weight.shape[1], dtype=weight.dtype)[None])
                input_qparams = observer.qparams()
            codes = quantize(weight, qparams, scheme.weights)
            model.set_submodule(name, QuantizedLinear.from_linear(linear, scheme, codes, qparams, input_qparams=input_qparams))
            schemes[name] = scheme
        return schemes

    return replace


@pytest.fixture
def token_ids() -> torch.Tensor:
    return torch.arange(40).reshape(2, 20) * 7 % VOCAB_SIZE


@pytest.fixture
def make_tokenizer() -> Callable[[], object]:
    """Build a tokenizer of whole words."""

    def make() -> object:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocab = {"<unk>": 0, "a": 1, "b": 2}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")

    return make


@pytest.fixture
def source_dir(make_model, make_tokenizer, tmp_path):
    """A folder as a user has it: weights, config, tokenizer, and files that are nobody's business."""
    from compressor.model.loading.load import quiet_transformers

    folder = tmp_path / "source"
    with quiet_transformers():
        make_model().save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("about the base")
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    (folder / "modeling_evil.py").write_text("raise SystemExit('ran')")
    (folder / "tokenizer_evil.py").write_text("raise SystemExit('ran')")
    return folder


@pytest.fixture
def tiny_moe() -> Callable[[str], nn.Module]:
    """Build a mixture-of-experts model with random float32 weights; equal for equal kinds."""

    def make(kind: str) -> nn.Module:
        from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, PreTrainedConfig, Qwen2MoeConfig

        base = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
        ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        few = {**base, **ids, "num_experts_per_tok": 2, "num_key_value_heads": 2}
        ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        deepseek = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, **ranks}
        configs: dict[str, Callable[[], PreTrainedConfig]] = {
            "mixtral": lambda: tiny.config("mixtral", **few, intermediate_size=48),
            "qwen3_moe": lambda: tiny.config("qwen3_moe", **few, intermediate_size=48, moe_intermediate_size=24, num_experts=8),
            "qwen2_moe": lambda: Qwen2MoeConfig(
                **few, intermediate_size=48, moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=8
            ),
            "deepseek_v3": lambda: DeepseekV3Config(
                **{**few, "num_key_value_heads": 4}, intermediate_size=48, moe_intermediate_size=24, **deepseek
            ),
            "gpt_oss": lambda: GptOssConfig(**few, intermediate_size=24, num_local_experts=4, head_dim=8),
        }
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model: nn.Module = AutoModelForCausalLM.from_config(configs[kind](), dtype=torch.float32).eval()
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    nn.init.normal_(parameter, std=0.1)
        return model

    return make
