"""Starts the processes of one run: on this machine, under SLURM, on Ray, on TPU VMs, on Kubernetes."""
