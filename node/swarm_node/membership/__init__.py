"""Which layers this node holds, and what it says of itself to the swarm. What runs in them is `serving`'s."""
