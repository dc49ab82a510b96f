"""What is read while a run goes; training and `watch` share it."""
