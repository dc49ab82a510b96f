"""What a plan needs and takes, foreseen; and what it could be."""
