/* relax_backward of swarm.planner.routing.dag, compiled: the same numbers as relax_backward_plain there, where they are
 * documented.
 *
 * Reads and fills arrays of int64 that Python made, in C order. A row's links are read from the first to
 * the last row that can be entered; those between that cannot be entered cost INFINITE, so there is nothing to gather.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define INFINITE ((int64_t)1 << 61)

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default"))) /* chosen when it is loaded */
#else
#define FOR_EACH_CPU
#endif

typedef struct {
    Py_ssize_t layers, rows;
    const int64_t *tau;                     /* [L, R] */
    const int64_t *rho;                     /* [R, R] by (from, to) */
    const int64_t *exits;                   /* [R] */
    const uint8_t *may_enter, *may_leave;   /* [L + 1, R] by boundary, or NULL for everywhere */
    int64_t *go;                            /* [L + 1, R] */
} Sweep;

/* The cheapest way on through any of the rows [lo, hi). */
static inline int64_t least(const int64_t *link, const int64_t *entry, Py_ssize_t lo, Py_ssize_t hi) {
    int64_t best = INFINITE;
    for (Py_ssize_t to = lo; to < hi; to++) {
        int64_t cost = link[to] + entry[to];
        best = cost < best ? cost : best;
    }
    return best;
}

/* `entry`: room for R numbers. */
FOR_EACH_CPU static void run(const Sweep *s, int64_t *entry) {
    const Py_ssize_t rows = s->rows;
    for (Py_ssize_t r = 0; r < rows; r++)
        s->go[s->layers * rows + r] = INFINITE;
    for (Py_ssize_t layer = s->layers - 1; layer >= 0; layer--) {
        const Py_ssize_t boundary = (layer + 1) * rows;
        const int last = layer == s->layers - 1; /* after which there is no next hop */
        const int64_t *after = last ? s->exits : s->go + boundary;
        const int64_t *tau = s->tau + layer * rows;
        Py_ssize_t lo = rows, hi = 0;
        for (Py_ssize_t r = 0; r < rows && !last; r++) {
            entry[r] = s->may_enter && !s->may_enter[boundary + r] ? INFINITE : after[r];
            if (entry[r] < INFINITE) {
                lo = r < lo ? r : lo;
                hi = r + 1;
            }
        }
        for (Py_ssize_t r = 0; r < rows; r++) {
            int64_t best = INFINITE;
            if (tau[r] < INFINITE) {
                best = after[r];
                if (!s->may_leave || s->may_leave[boundary + r]) {
                    int64_t onward = least(s->rho + r * rows, entry, lo, hi);
                    best = onward < best ? onward : best;
                }
                best = best + tau[r] < INFINITE ? best + tau[r] : INFINITE;
            }
            s->go[layer * rows + r] = best;
        }
    }
}

static int fits(const Py_buffer *array, Py_ssize_t bytes) {
    return array->obj == NULL || array->len == bytes;
}

static PyObject *sweep(PyObject *self, PyObject *args) {
    Sweep s;
    Py_buffer tau, rho, exits, may_enter, may_leave, go;
    (void)self;
    if (!PyArg_ParseTuple(args, "nny*y*y*z*z*w*", &s.layers, &s.rows, &tau, &rho, &exits, &may_enter, &may_leave, &go))
        return NULL;
    const Py_ssize_t row = s.rows * (Py_ssize_t)sizeof(int64_t), flags = (s.layers + 1) * s.rows;
    int64_t *entry = NULL;
    if (s.layers < 1 || s.rows < 0 || !fits(&tau, s.layers * row) || !fits(&rho, s.rows * row) || !fits(&exits, row)
        || !fits(&may_enter, flags) || !fits(&may_leave, flags) || !fits(&go, (s.layers + 1) * row))
        PyErr_SetString(PyExc_ValueError, "the arrays of a sweep do not fit its layers and rows");
    else if ((entry = PyMem_Malloc(row + 1)) == NULL)
        PyErr_NoMemory();
    else {
        s.tau = tau.buf, s.rho = rho.buf, s.exits = exits.buf, s.go = go.buf;
        s.may_enter = may_enter.buf, s.may_leave = may_leave.buf;
        Py_BEGIN_ALLOW_THREADS
        run(&s, entry);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(entry);
    PyBuffer_Release(&tau), PyBuffer_Release(&rho), PyBuffer_Release(&exits);
    PyBuffer_Release(&may_enter), PyBuffer_Release(&may_leave), PyBuffer_Release(&go);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"sweep", sweep, METH_VARARGS, "Fills the last array; see relax_backward_plain."}, {0}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_relax", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__relax(void) {
    return PyModuleDef_Init(&module);
}
