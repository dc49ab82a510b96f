"""Say what a corpus holds, in one pass and with bounded memory."""
