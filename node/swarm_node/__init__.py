"""The node daemon: lends this machine to a swarm. Imports `swarm`, `swarm.planner`, `swarm.net` and `swarm_kernels`."""
