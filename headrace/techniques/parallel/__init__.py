"""The mesh: who holds which part of the model and of the batch."""
