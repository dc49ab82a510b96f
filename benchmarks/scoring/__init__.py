"""Compute how right predictions and verdicts were, from the rows in results/ and nothing else."""

from scoring.marks import HEAD, MARKS, judge, notes, table
from scoring.numbers import compute

__all__ = ["HEAD", "MARKS", "compute", "judge", "notes", "table"]
