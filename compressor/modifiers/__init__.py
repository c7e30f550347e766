"""Modifiers: what to hook, when to compress. The arithmetic is in `compressor.algorithms`; `registry` knows them by name.

registry.py      name in a recipe -> class             quantization.py  round-to-nearest, at once or in a training
gptq.py          second-order error compensation       autoround.py     rounding learned by signed gradients
own_forwards.py  data shown before any stage           scale_tuning.py  scales and norms, codes fixed
fallbacks.py     modules that a simpler algorithm takes over
pruning/         zeros                                 transforms/      what leaves the model's function as it is
schemes/         what all that quantize share          tuning/          what all that train on calibration data share
"""

from __future__ import annotations

from compressor import look_up

__getattr__ = look_up  # where llm-compressor has them
