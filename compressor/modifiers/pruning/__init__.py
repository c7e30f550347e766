"""Modifiers that set weights to zero.

masks.py       weights kept at zero, in training too      magnitude.py   the smallest weights
calibrated.py  what pruning layer after layer shares      sparsegpt.py   the weights whose loss the others make good
wanda.py       small weights that meet small inputs
"""
