"""One run in several processes, started by torchrun: who counts which samples, who solves what, and what happens when one of them fails.

ranks.py     the processes of a run: sums over all of them, values from one to all
messages.py  nested values with tensors as bytes, without pickle
watch.py     signs of life, and the one error that ends all
launch.py    the process group of a command
"""

from __future__ import annotations
