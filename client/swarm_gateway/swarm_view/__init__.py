"""What readers of `/swarm` see: the nodes, and the answers that this gateway writes now."""
