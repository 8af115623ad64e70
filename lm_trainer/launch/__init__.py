"""Starts the processes of a run on this machine, under SLURM, on Ray, on TPU VMs or on Kubernetes."""
