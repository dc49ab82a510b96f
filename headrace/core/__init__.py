"""This package holds what every other package shares: errors, files, units. It needs no torch."""
