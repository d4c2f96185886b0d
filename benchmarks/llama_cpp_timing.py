"""Times llama.cpp for llama_cpp_process.py, in a Python that has its bindings (nothing of swarm is imported here).

`llama_cpp_timing.py MODEL.gguf THREADS CONTEXT`: fills the context, prints "ready", then answers each line "ROWS"
or "ROWS FIRST" with the milliseconds a batch of that many tokens takes, all of them with logits; the batch is forgotten
again. Tokens are 1000, 1001 and so on, or begin at FIRST. "logits" is answered with the first logits of the next token.
"""

import sys
import time

import llama_cpp

LOGITS = 256


def main() -> None:
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = context + 128, max(context, 128), max(context, 128)
    params.n_threads = params.n_threads_batch = threads
    running = llama_cpp.llama_init_from_model(model, params)
    memory = llama_cpp.llama_get_memory(running)

    def decode(start: int, rows: int, first: int) -> float:
        batch = llama_cpp.llama_batch_init(rows, 0, 1)
        batch.n_tokens = rows
        for i in range(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = first + i, start + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, True
        begun = time.perf_counter()
        if llama_cpp.llama_decode(running, batch) != 0:
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(running)
        taken = time.perf_counter() - begun
        llama_cpp.llama_batch_free(batch)
        return 1e3 * taken

    for start in range(0, context, 64):  # all rows have logits: little by little
        decode(start, min(64, context - start), 1000 + start)
    print("ready", flush=True)
    for line in sys.stdin:
        wants_logits = line == "logits\n"
        rows, _, first = ("1" if wants_logits else line).partition(" ")
        taken = decode(context, int(rows), int(first or 1000 + context))
        llama_cpp.llama_memory_seq_rm(memory, 0, context, -1)
        print(*llama_cpp.llama_get_logits(running)[:LOGITS] if wants_logits else (taken,), flush=True)


if __name__ == "__main__":
    main()
