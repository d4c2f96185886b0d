"""Sessions of strangers: judged, admitted, computed in batches, sent on. Knows neither the DHT nor the owner."""
