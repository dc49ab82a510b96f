"""Start a plan on an engine: write what the engine expects, submit it, and follow it.

`job.py` holds one job as a typed object, `engine.py` what an engine must be able to do, and each
engine is one file: it renders the job and names the commands that submit, show and stop it. Nothing
of an engine is imported here: Headrace talks to it through its own command line.
"""
