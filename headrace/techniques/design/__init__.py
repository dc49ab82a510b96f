"""Hold the techniques that change the model's design."""
