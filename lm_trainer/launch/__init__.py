"""Starting the processes of one run: on this machine, under SLURM, on a Ray cluster."""
