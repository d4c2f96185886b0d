"""A swarm in virtual time that runs the real planner: see `swarm.planner.cli.simulate`."""
