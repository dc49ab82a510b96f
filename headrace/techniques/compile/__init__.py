"""Compilation: fewer, larger kernels and less host work."""
