"""This node's end of the network: its transport and directory, mDNS, the invitation to its swarm."""
