"""This room holds attention backends, masks, and what stands in the place of attention."""
