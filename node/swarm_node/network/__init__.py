"""This node's end of the network: its transport and directory, its neighbours, the invitation to its swarm."""
