"""Modifiers: what to hook, when to compress. The arithmetic is in `compressor.algorithms`; `registry` knows them by name.

registry.py         name in a recipe -> class
scheme_targets.py   which linear layer gets which scheme
scheme_modifier.py  the lifecycle that quantizing modifiers share
inputs.py           what is learnt from the inputs of layers
quantization.py     round-to-nearest        gptq.py  second-order error compensation
qat.py              the same in training, with rounding in the forward
masks.py            weights kept at zero    magnitude.py  which ones, and when
"""
