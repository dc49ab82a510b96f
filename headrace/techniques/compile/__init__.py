"""This room holds what compiles: it makes fewer, larger kernels and less host work."""
