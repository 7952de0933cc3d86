"""Starting workers and servers: here, on hosts, with mpiexec or srun, and in the lab."""
