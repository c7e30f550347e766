"""Modifiers that change weights and leave the model's function as it is.

moving_scales.py  statistics, pairs, the record     smoothing.py  SmoothQuant, logarithmic equalization     awq.py  AWQ
spinquant.py      what is turned, and the record    learned_rotations.py  how it learns      written_roles.py  mappings of a recipe
"""
