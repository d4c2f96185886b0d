"""The outside world: identities, transports, the DHT. No torch, no plan."""
