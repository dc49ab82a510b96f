"""Run the pipeline on an engine: in processes of this machine, on Ray, or as a Slurm array."""
