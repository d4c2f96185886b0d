"""The language every part of the swarm speaks: types, errors, config, wire messages, DHT records.

Imports neither torch nor any room below it. `swarm.planner` decides and is pure; `swarm.net` reaches other machines.
"""

__version__ = "0.1.0"
