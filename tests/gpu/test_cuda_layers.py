"""The runtime layers on a GPU: the same bytes, the CPU's results up to rounding, and the products of codes that only a GPU has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from compressor.nn import QuantizedLayer, quantized, set_matmul
from compressor.nn.attention.kv_cache import QuantizedKVCache, attach_kv_quantizer, attention_modules, cache_argument
from compressor.numerics import PRESETS, QuantizationArgs, code_product, make_observer, preset_scheme, product_path
from harness import verify_module

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def layer_of(preset: str, dtype: torch.dtype, rows: int = 64, columns: int = 256) -> QuantizedLayer:
    linear = nn.Linear(columns, rows, dtype=dtype)
    generator = torch.Generator().manual_seed(rows)
    with torch.no_grad():
        linear.weight.copy_(torch.rand(linear.weight.shape, generator=generator) - 0.5)
        linear.bias.copy_(torch.rand(rows, generator=generator))
    scheme, inputs = preset_scheme(preset), None
    args = scheme.input_activations
    if args is not None and args.dynamic is not True:
        observer = make_observer(args)
        observer.update(torch.linspace(-1, 1, columns, dtype=dtype))
        inputs = observer.qparams()
    return quantized(linear, scheme, input_qparams=inputs)


def input_of(dtype: torch.dtype, tokens: int = 20, columns: int = 256) -> torch.Tensor:
    return (torch.rand(2, tokens, columns, generator=torch.Generator().manual_seed(1)) - 0.5).to(dtype)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "INT8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("matmul", ["reference", "native"])
def test_a_layer_moves_to_the_gpu_and_computes_what_the_cpu_computes(preset, dtype, matmul, device):
    layer, x = layer_of(preset, dtype), input_of(dtype)
    set_matmul(layer, matmul)
    expected, weight = layer(x), layer.dequantized_weight()
    before = {key: (value.dtype, value.clone()) for key, value in layer.state_dict().items()}
    layer.to(device)
    assert {key: value.dtype for key, value in layer.state_dict().items()} == {key: dtype for key, (dtype, _) in before.items()}
    assert all(value.device.type == device.type for value in layer.state_dict().values())
    assert torch.equal(layer.dequantized_weight().cpu(), weight)
    found = layer(x.to(device)).cpu()
    # Inputs are quantized on the GPU too: a code at a tie may differ by one, and a code of 4 bits is a coarse step.
    tolerance = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}[dtype] + (0.05 if "4" in preset.partition("A")[2] else 0)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    layer.cpu()
    assert all(torch.equal(value.view(torch.uint8), layer.state_dict()[key].view(torch.uint8)) for key, (_, value) in before.items())


@pytest.mark.parametrize("preset", ["W4A16", "W8A8", "FP8", "FP8_BLOCK", "NVFP4", "MXFP4"])
@pytest.mark.parametrize("matmul", ["reference", "native"])
def test_the_contract_of_modules_holds_on_the_gpu(preset, matmul, device):
    layer = layer_of(preset, torch.bfloat16).to(device)
    set_matmul(layer, matmul)
    assert verify_module(layer, input_of(torch.bfloat16).to(device)).passed


@pytest.mark.parametrize("shape", [(17, 64, 64), (16, 64, 64), (33, 63, 64), (33, 64, 63), (1, 1, 1), (128, 4096, 256)])
def test_integer_products_on_the_gpu_are_exact_on_every_path(shape, device):
    tokens, columns, rows = shape
    generator = torch.Generator().manual_seed(columns)
    x, weight = (torch.randint(-128, 128, (size, columns), dtype=torch.int8, generator=generator) for size in (tokens, rows))
    exact = x.long() @ weight.long().t()
    for path in {product_path(torch.int8, device, tokens, columns, rows), "int_exact"}:
        assert torch.equal(code_product(x.to(device), weight.to(device), path).cpu().long(), exact)


@pytest.mark.parametrize("shape", [(1, 16, 16), (17, 64, 64), (33, 128, 48), (5, 63, 64)])
def test_fp8_products_on_the_gpu_agree_with_exact_ones(shape, device):
    tokens, columns, rows = shape
    generator = torch.Generator().manual_seed(columns)
    x, weight = ((torch.rand(size, columns, generator=generator) * 8 - 4).to(torch.float8_e4m3fn) for size in (tokens, rows))
    path = product_path(torch.float8_e4m3fn, device, tokens, columns, rows)
    fits = columns % 16 == 0 and rows % 16 == 0 and torch.cuda.get_device_capability(device) >= (8, 9)
    assert path == ("scaled_mm" if fits else "fp8_exact")
    exact = code_product(x, weight, "fp8_exact")
    found = code_product(x.to(device), weight.to(device), path).cpu()
    assert torch.allclose(found, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


def test_keys_and_values_are_quantized_on_the_gpu_as_on_the_cpu(device):
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, eos_token_id=None)
    model = LlamaForCausalLM(config).eval()
    args = QuantizationArgs(type="float", strategy="token", dynamic=True)
    for name, attention in attention_modules(model).items():
        attach_kv_quantizer(attention, args, name=name)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        model.to(device)
        found = model(ids.to(device)).logits.cpu()
        assert torch.allclose(found, expected, atol=0.05 * float(expected.abs().max()))
        plain = model.generate(ids.to(device), max_new_tokens=4, do_sample=False)
        assert torch.equal(
            plain, model.generate(ids.to(device), max_new_tokens=4, do_sample=False, **{cache_argument(model): QuantizedKVCache(model)})
        )
