"""How a node schedules the steps of its sessions: the one model that nodes, the simulator and benchmarks run.

`BatchScheduler` says which steps share a batch and how long to wait for more, `LayerTimeEstimator` what a layer costs
now, `SchedulingPolicy` has the numbers. `SessionOrder` stands in for the node's task a session in simulations.
"""
