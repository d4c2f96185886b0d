"""The outside world: identities, carriers, the DHT. No torch, no plan."""
