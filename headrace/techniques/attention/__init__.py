"""Attention backends and masks."""
