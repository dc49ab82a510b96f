"""One file per technique, in rooms by what it touches. Found by import; nothing is registered."""
