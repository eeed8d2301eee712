"""Passes of the model that fail at random, to see what a fault does to those around it; and a server with such passes.

python -m experiments.faults --target smollm2_135m --port 8000 --fault-rate 0.002
"""

import argparse
import random
from typing import Any

from verifier.target import Target

FAULT = "injected fault"


def fail_at_random(target: Target, rate: float, seed: int = 0) -> None:
    """Let this share of the target's passes raise an error."""
    forward, chance = target.forward_blocks, random.Random(seed)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if chance.random() < rate:
            raise RuntimeError(FAULT)
        return forward(*args, **kwargs)

    target.forward_blocks = faulty  # type: ignore[method-assign]


def serve(options: argparse.Namespace) -> None:
    """`dcoco serve`, with faults in its passes once it is ready."""
    import torch
    import uvicorn

    from dcoco import DCOCODecoder
    from dcoco.engine import Engine
    from dcoco.server.address import bind
    from dcoco.server.app import create_app
    from dcoco.server.run import Server

    torch.set_num_threads(options.threads or torch.get_num_threads())
    listener = bind("127.0.0.1", options.port)
    decoder = DCOCODecoder.from_pretrained(
        options.target, options.drafter, options.device, options.dtype, max_rows=options.max_num_seqs
    )
    engine = Engine(decoder, options.method, options.max_num_seqs, options.max_model_len, options.max_waiting)
    fail_at_random(decoder.target, options.fault_rate, options.seed)
    app = create_app(engine, options.target, max_body_bytes=options.max_body_bytes)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=60)
    Server(config, lambda: print("ready", flush=True), options.grace).run([listener])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.faults")
    for name in ("target", "drafter", "method", "dtype", "device"):
        parser.add_argument(f"--{name}")
    for name in ("port", "threads", "max-num-seqs", "max-model-len", "max-waiting", "max-body-bytes", "seed"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--fault-rate", type=float, default=0.0)
    parser.add_argument("--grace", type=float, default=5.0, help="seconds that running requests have at the end")
    serve(parser.parse_args())


if __name__ == "__main__":
    main()
