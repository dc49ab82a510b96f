"""Plans tried: readings in processes of their own, pairs of plans, and the tuner.

Nothing here trains in the process that asks: a crash, an out of memory or a leaked global of a
trial ends with its process.
"""
