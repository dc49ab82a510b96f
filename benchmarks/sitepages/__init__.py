"""Make the pages of the documentation that rows, cards and errors say, and no hand writes.

`docs/hooks.py` calls these while mkdocs builds, so a page is never behind its rows.
"""
