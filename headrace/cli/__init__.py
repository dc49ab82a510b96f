"""The command line has one module for each group of verbs."""
