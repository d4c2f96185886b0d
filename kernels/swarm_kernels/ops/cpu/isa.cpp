// Compiled once per instruction set, which the compiler flags select.
#include "attention.h"
#include "gating.h"
#include "linear.h"
#include "norm_rope.h"
#include "recurrence.h"
#include "routing.h"

namespace SWARM_ISA {

#define SWARM_NAME_OF(x) #x
#define SWARM_NAME(x) SWARM_NAME_OF(x)

extern const swarm::KernelTable table;
const swarm::KernelTable table = {
    SWARM_NAME(SWARM_ISA), row_tile, fill_tile, quantize, row_bytes,  linear, inverse_rms,
    scale_row,             add_row,  rope,      write_kv, query_tile, attend_workspace, attend, merge,
    gate_row,              route_row, convolve, prepare_recurrence, recur, norm_gated, STATE_COLUMNS,
};

}  // namespace SWARM_ISA
