"""Update rules."""
