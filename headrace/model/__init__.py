"""The decoder, its parts, and the families that it can be."""
