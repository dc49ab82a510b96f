"""Headrace trains language models and finds the narrowest channel of your run."""

__version__ = "0.1.0"
