"""Define what is asked of a run: the plan, a technique's contract, and changes between plans."""
