"""What varies in time."""
