"""Write trained models in the formats of other tools."""
