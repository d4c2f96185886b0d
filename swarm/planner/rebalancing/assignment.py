"""The assignment problem: n agents, n places, least total cost.

Owns the algorithm only (Jonker and Volgenant 1987: shortest augmenting paths over dual prices). Costs are whole
numbers and ties go to the lower place, so that equal inputs give equal results on every machine.

Why not `scipy.optimize.linear_sum_assignment`, which is 15 to 50 times faster from 256 nodes on (5 s instead of 79 s
for 4096): how it breaks ties is not specified and has changed between its releases (scipy issue 11602), while nodes
that plan from the same snapshot may run different ones. Nor can ties be perturbed away: it computes in doubles, exact
below 2^53, costs here reach 2^40, and a perturbation of n^2 cells that is sure to leave one optimum needs n^2 bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def min_cost_assignment(cost: Ints) -> list[int]:
    """The place of each agent, one each, at least total cost; `cost`: `[n, n]` by (agent, place). O(n³), vectorised."""
    n = len(cost)
    far = np.int64(np.iinfo(np.int64).max // 4)
    price_agent, price_place = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    agent_of = np.full(n + 1, -1)  # place n: where the augmenting path starts
    for agent in range(n):
        agent_of[n] = agent
        distance, came_from = np.full(n, far), np.full(n, n)
        done = np.zeros(n + 1, np.bool_)
        place = n
        while agent_of[place] >= 0:
            done[place] = True
            reduced = cost[agent_of[place]] - price_agent[agent_of[place]] - price_place[:n]
            better = ~done[:n] & (reduced < distance)
            distance[better], came_from[better] = reduced[better], place
            following = int(np.where(done[:n], far, distance).argmin())
            step = distance[following]
            visited = np.flatnonzero(done)
            price_agent[agent_of[visited]] += step
            price_place[visited] -= step
            distance[~done[:n]] -= step
            place = following
        while place != n:
            agent_of[place] = agent_of[came_from[place]]
            place = int(came_from[place])
        agent_of[n] = -1
    places = [0] * n
    for place in range(n):
        places[int(agent_of[place])] = place
    return places
