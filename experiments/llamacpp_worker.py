"""Answers prompts with llama.cpp: run by the Python of an environment that has llama-cpp-python, and nothing of ours.

    PYTHON llamacpp_worker.py GGUF MAX_LENGTH BATCH THREADS

A line of JSON on stdin is a batch of prompts as token ids, a line on stdout what came of it, with the seconds from the
first pass of a prompt to the last token. Each sequence is prefilled, then all step together; one that ends leaves the
batch. Tokens are chosen by llama.cpp's own samplers.
"""

import json
import sys
import time

import llama_cpp.llama_cpp as llama

PREFILL = 256  # tokens of a prompt that run at once


def main(gguf: str, max_length: int, batch: int, threads: int) -> None:
    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(gguf.encode(), llama.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp can't load {gguf}")
    options = llama.llama_context_default_params()
    options.n_ctx = max_length * batch
    options.n_batch = options.n_ubatch = PREFILL
    options.n_seq_max = batch
    options.n_threads = options.n_threads_batch = threads
    options.kv_unified = True  # rows of any lengths share the room
    context = llama.llama_init_from_model(model, options)
    if not context:
        sys.exit(f"llama.cpp can't make a context of {options.n_ctx} tokens")
    tokens = llama.llama_batch_init(max(PREFILL, batch), 0, 1)
    for line in sys.stdin:
        print(json.dumps(answer(context, tokens, json.loads(line))), flush=True)


def answer(context, tokens, asked: dict) -> dict:
    """Decode the prompts of one request together."""
    llama.llama_memory_clear(llama.llama_get_memory(context), False)
    sampler = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    if asked["temperature"]:
        llama.llama_sampler_chain_add(sampler, llama.llama_sampler_init_temp(asked["temperature"]))
        llama.llama_sampler_chain_add(sampler, llama.llama_sampler_init_dist(asked["seed"] % 2**32))
    else:
        llama.llama_sampler_chain_add(sampler, llama.llama_sampler_init_greedy())
    eos, begun, prefill = set(asked["eos"]), time.perf_counter(), 0.0
    texts: list[list[int]] = []
    for row, prompt in enumerate(asked["prompts"]):
        for start in range(0, len(prompt), PREFILL):
            chunk = prompt[start : start + PREFILL]
            last = start + len(chunk) == len(prompt)
            run(context, tokens, [(token, start + i, row, False) for i, token in enumerate(chunk)], last)
        texts.append([llama.llama_sampler_sample(sampler, context, -1)])
    prefill = time.perf_counter() - begun
    while going := [row for row, text in enumerate(texts) if text[-1] not in eos and len(text) < asked["max_tokens"]]:
        places = [(texts[row][-1], len(asked["prompts"][row]) + len(texts[row]) - 1, row, True) for row in going]
        run(context, tokens, places, True)
        for index, row in enumerate(going):
            texts[row].append(llama.llama_sampler_sample(sampler, context, index))
    seconds = time.perf_counter() - begun
    llama.llama_sampler_free(sampler)
    return {"tokens": texts, "seconds": seconds, "prefill_seconds": prefill}


def run(context, tokens, places: list[tuple[int, int, int, bool]], last: bool) -> None:
    """One pass over tokens, each with its position, its row and whether its logits are wanted; the last one's if so."""
    tokens.n_tokens = len(places)
    for index, (token, position, row, wanted) in enumerate(places):
        tokens.token[index], tokens.pos[index] = token, position
        tokens.n_seq_id[index], tokens.seq_id[index][0] = 1, row
        tokens.logits[index] = wanted or (last and index == len(places) - 1)
    if status := llama.llama_decode(context, tokens):
        sys.exit(f"llama_decode failed with status {status}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
