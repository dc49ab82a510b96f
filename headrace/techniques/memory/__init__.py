"""Memory: what is kept, where, and for how long."""
