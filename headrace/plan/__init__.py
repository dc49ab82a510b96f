"""What is asked of a run: the plan, the contract of a technique, and changes between plans."""
