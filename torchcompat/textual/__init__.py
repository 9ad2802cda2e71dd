"""A torch that is not imported: its source read as text, its patches judged over stand-ins.

Nothing of the torch looked at is ever executed. See `tree` for what is read and within which
bounds, `pseudo` for the stand-ins, `worker` for the process in which they stand.
"""
