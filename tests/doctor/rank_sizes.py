"""Give tests of several ranks a model, and the batch that they share."""

SIZES = """
[model]
layers = 8
dim = 1024
precision = "bf16"
[data]
vocab = 32768
sequence_length = 1024
[goal]
steps = 9
[batch]
tokens = 65536
"""
