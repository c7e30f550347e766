"""Which weights become zero, and what becomes of the others.

magnitude.py  the smallest, exactly as many as asked      schedule.py   how many at which step of a training
sparsegpt.py  the cheapest, column after column           wanda.py      small weights on small inputs; shares for layers by outliers
reap.py       experts that add least to what is sent to them    refit.py   least squares for the others
"""
