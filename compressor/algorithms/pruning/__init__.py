"""Which weights become zero, and what becomes of the others.

magnitude.py  the smallest, exactly as many as asked      schedule.py   how many at which step of a training
sparsegpt.py  the cheapest, column after column           wanda.py      small weights on small inputs; shares for layers by outliers
"""
