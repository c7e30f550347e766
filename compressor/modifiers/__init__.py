"""Modifiers: what to hook, when to compress. The arithmetic is in `compressor.algorithms`; `registry` knows them by name.

registry.py     name in a recipe -> class
gptq.py         second-order error compensation      autoround.py      rounding learned by signed gradients
qat.py          rounding in the forward of training
magnitude.py    which weights go, and when           pruning_masks.py  weights kept at zero
quantization.py round-to-nearest                     schemes/          what all that quantize share
scale_tuning.py scales and norms, codes fixed        tuning/           what all that train on calibration data share
"""
