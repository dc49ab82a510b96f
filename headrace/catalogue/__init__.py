"""Render what exists: tables, cards and explanations made from the techniques themselves."""
