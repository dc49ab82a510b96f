"""Try plans in processes of their own: pairs of plans are timed, judged, and kept or undone.

Nothing here trains in the process that asks: a crash, an out of memory or a leaked global of a
trial ends with its process.
"""
