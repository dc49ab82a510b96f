"""What text is worth: duplicates, text of evaluation sets; plain pieces without plan or verbs."""
