"""Modifiers that change weights and leave the model's function as it is.

moving_scales.py  statistics, pairs, the record      smoothing.py  SmoothQuant, logarithmic equalization      awq.py  AWQ
"""
