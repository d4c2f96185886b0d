"""Which layers this node holds, and what it publishes about itself. What runs in them is in `serving`."""
