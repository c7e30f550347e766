"""Golden outputs: what was accepted once is held against what comes out today; and the fixed data that every measurement starts from.

names.py       a golden's name as a path, so that no two collide
platforms.py   where a golden was accepted, and which variant is nearest
tensors.py     tensors as bytes, and the hashes of inputs and recipes
manifest.py    the sorted record beside the files
store.py       hold tensors against their golden; never writes
candidates.py  what a failed check would have wanted, in a cache folder
writer.py      make candidates the goldens, all or none
golden.py      what a test sees: `golden.check(...)`
command.py     `harness golden diff | accept | prune | why | list`
cases.py       the goldens of this project, as a table
reference_*    the reference model and its tokens
"""

from __future__ import annotations
