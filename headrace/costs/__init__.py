"""One cost model: what a step computes, moves and keeps, and the rates that price it."""
