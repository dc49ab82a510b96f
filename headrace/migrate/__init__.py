"""This room reads the config of another trainer, and makes a plan of it, key by key."""
