import numpy as np
from numpy.typing import NDArray

def sweep(
    layers: int,
    rows: int,
    tau: NDArray[np.int64],
    rho: NDArray[np.int64],
    exits: NDArray[np.int64],
    may_enter: NDArray[np.bool_] | None,
    may_leave: NDArray[np.bool_] | None,
    go: NDArray[np.int64],
    /,
) -> None: ...
