"""What modifiers share that train something on the calibration data after the codes are known, or to find them.

sequences.py    calibration batches, cut into sequences and put together again
base_outputs.py what the uncompressed model predicts, and how far the compressed one is from it
moves.py        what moves: group scales and norms         budget.py   how long, how fast, and the best state
blocks.py       blocks by themselves: what they are called with, what they should give
"""
