"""What all packages share: types, errors, config, wire messages, DHT records.

Imports neither torch nor its own folders. `swarm.planner` decides and is pure; `swarm.net` is the network.
"""

__version__ = "0.1.0"
