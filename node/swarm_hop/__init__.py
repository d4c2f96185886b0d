"""What a hop of a chain does with its layers: sessions, batches, audits, fair shares. A node serves strangers with it,
a client the ends of the model that it holds itself. Imports `swarm`, `swarm.planner`, `swarm.net` and `swarm_kernels`;
knows neither the DHT nor an owner."""
