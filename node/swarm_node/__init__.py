"""The node daemon: lends this machine to a swarm. Imports `swarm`, `swarm.plan`, `swarm.net` and `swarm_kernels`."""
