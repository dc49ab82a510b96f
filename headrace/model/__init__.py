"""Floor 2: the decoder, its parts, and the families that it can be."""
