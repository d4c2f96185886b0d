"""How a node schedules the steps of its sessions: continuous batching, shared by nodes, the simulator and benchmarks.

`BatchScheduler` decides which steps share a batch and how long to wait for more, `LayerTimeEstimator` estimates what a
layer costs now, `SchedulingPolicy` has the tuning constants. `SessionOrder` replaces the node's task a session in
simulations.
"""
