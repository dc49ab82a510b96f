"""Conversations are documents here: rows, templates, and which of their tokens count."""
