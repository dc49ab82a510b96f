"""Hold the techniques that keep a run stable, or bring it back."""
