"""The folder of a synthetic run is lent by tests/synthetic_run.py."""

from synthetic_run import make_run as make_run  # a fixture
