"""Talk to a swarm: `SwarmClient` and the terminal client. Never imports the node."""
