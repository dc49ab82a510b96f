"""What exists, in words: tables, cards and explanations made from the techniques themselves."""
