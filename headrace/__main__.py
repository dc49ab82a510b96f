"""`python -m headrace` is `headrace`."""

from headrace.cli import app

app(prog_name="headrace")
