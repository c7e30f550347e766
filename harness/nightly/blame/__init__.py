"""Which commit made a metric worse: `git bisect` with the statistic of the nights, then the layer that the commit changed.

repository.py  commits, their trees, git's own search among them      measuring.py  a metric, or a cell's outcome, in the tree of a commit
deciding.py    is a commit as the good one or as the bad one          outcomes.py   likewise of a cell, which may fail by chance
search.py      between which nights' commits; the search, resumable; from the commit to the layer
answer.py      what a search found
"""
