"""What a row holds and in which order rows come."""
