"""This node's end of the network: its carrier and directory, its neighbours, the invitation to its swarm."""
