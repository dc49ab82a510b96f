"""Hold what a Python program calls: `headrace.train`, `headrace.open_run` and the others.

Each does what a verb of the command line does, by the same code, and returns what the verb prints
as an object. `docs/guide/python.md` shows them. Nothing here is imported before it is used.
"""
