"""Sessions of untrusted clients: validated, admitted, computed in batches, forwarded. Uses no DHT."""
