"""Command line of dcoco.

    dcoco targets
    dcoco fetch smollm2_135m
    dcoco generate --target smollm2_135m "Why is the sky blue?"
    dcoco serve --target smollm2_135m --port 8000

`generate` writes the text to stdout as it comes and one line of statistics to stderr.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from dcoco.errors import DcocoError
from dcoco.fetch import fetch
from dcoco.server.address import bind
from dcoco.server.options import DEFAULT_MODEL_LEN, Options
from dcoco.targets import list_names, resolve_target

METHODS = ("dcoco", "walk", "top1", "plain")
# Options of `generate` that are SamplingParams fields; those not given keep the defaults that SamplingParams has.
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")
SERVE_PACKAGES = ("fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn")  # the extra `serve`


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for an error that dcoco names, 130 when interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except DcocoError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`head`, say) has gone; keep Python from complaining when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dcoco", description="Lossless speculative decoding with corrected drafts.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    targets = commands.add_parser("targets", help="list the names that --target and `fetch` know")
    targets.set_defaults(run=_targets)

    fetching = commands.add_parser("fetch", help="download, verify and convert a target's weights")
    fetching.add_argument("name", help="a name in conf/target, a GGUF file, or a hub id (owner/name)")
    fetching.set_defaults(run=_fetch)

    generate = commands.add_parser("generate", help="answer a prompt", argument_default=argparse.SUPPRESS)
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    generate.add_argument(
        "--target", required=True, help="a name (see `dcoco targets`), a folder, a GGUF file, a hub id"
    )
    generate.add_argument("--drafter", default=None, help="another drafter than the target's own: name, folder, hub id")
    generate.add_argument("--method", choices=METHODS, default="dcoco", help="how to decode (default: %(default)s)")
    generate.add_argument("--max-tokens", type=int, help="tokens to generate at most (default: 256)")
    generate.add_argument("--temperature", type=float, help="0 decodes greedily (default: 0)")
    generate.add_argument("--top-p", type=float, help="sample from the likeliest tokens of this mass (default: all)")
    generate.add_argument("--top-k", type=int, help="sample from this many likeliest tokens (default: all)")
    generate.add_argument("--seed", type=int, help="the same seed gives the same text")
    generate.add_argument(
        "--dtype", default=None, help="auto, bfloat16 or float32 (default: what the machine does best)"
    )
    generate.add_argument("--device", default=None, help="cpu, cuda ... (default: cuda where there is one)")
    generate.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's choice)")
    generate.add_argument("--raw", action="store_true", default=False, help="complete the text: no chat template")
    generate.set_defaults(run=_generate)

    _add_serve(commands.add_parser("serve", help="serve OpenAI's API"))
    return parser


def _add_serve(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("--target", required=True, help="a name (see `dcoco targets`), a folder, a GGUF file, a hub id")
    add("--host", default=Options.host, help="address to listen at; 0.0.0.0 is all of them (default: %(default)s)")
    add("--port", type=int, default=Options.port, help="0 takes a free one (default: %(default)s)")
    add("--drafter", help="another drafter than the target's own: name, folder, hub id")
    add("--method", choices=METHODS, default=Options.method, help="how to decode (default: %(default)s)")
    add("--dtype", help="auto, bfloat16 or float32 (default: what the machine does best)")
    add("--device", help="cpu, cuda ... (default: cuda where there is one)")
    add("--threads", type=int, help="CPU threads (default: torch's choice)")
    add("--api-key", default=os.environ.get("DCOCO_API_KEY") or None, help="key to use /v1 (default: $DCOCO_API_KEY)")
    add("--served-model-name", help="the model's name for clients (default: the target's)")
    limit = f"tokens of prompt and answer together (default: {DEFAULT_MODEL_LEN}, or what the target's positions allow)"
    add("--max-model-len", type=int, help=limit)
    add("--max-num-seqs", type=int, default=Options.max_num_seqs, help="answers at once (default: %(default)s)")
    add("--max-waiting", type=int, default=Options.max_waiting, help="answers that may wait (default: %(default)s)")
    add("--max-body-bytes", type=int, default=Options.max_body_bytes, help="length of a call (default: %(default)s)")
    add("--grace", type=float, default=Options.grace, help="seconds to finish in at the end (default: %(default)s)")
    serve.set_defaults(run=_serve)


def _targets(_: argparse.Namespace) -> None:
    names = list_names("target")
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {resolve_target(name).description}")


def _fetch(arguments: argparse.Namespace) -> None:
    print(fetch(resolve_target(arguments.name)))


def _generate(arguments: argparse.Namespace) -> None:
    given = {name: getattr(arguments, name) for name in SAMPLING if hasattr(arguments, name)}
    if arguments.threads is not None and arguments.threads < 1:
        raise DcocoError(f"--threads is {arguments.threads}; it must be at least 1")

    # Heavy imports stay out of the other commands.
    import torch

    from dcoco import DCOCODecoder, SamplingParams

    params = SamplingParams(**given)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    decoder = DCOCODecoder.from_pretrained(
        arguments.target, drafter=arguments.drafter, device=arguments.device, dtype=arguments.dtype, max_rows=1
    )
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    chat = not arguments.raw and getattr(decoder.tokenizer, "chat_template", None)
    output = None
    for chunk in decoder.stream([{"role": "user", "content": prompt}] if chat else prompt, params, arguments.method):
        print(chunk.text, end="", flush=True)
        output = chunk.output if chunk.output is not None else output
    print()
    if output is not None:
        stats = output.stats
        print(
            f"{len(output.token_ids)} tokens, {stats.tokens_per_second:.1f} tokens/s, "
            f"acceptance length {stats.mean_acceptance_length:.2f}",
            file=sys.stderr,
        )


def _serve(arguments: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(arguments).items() if name != "run"}
    options = Options(**given)
    try:
        listener = bind(options.host, options.port)
        from dcoco.server.run import serve
    except ModuleNotFoundError as error:
        if error.name in SERVE_PACKAGES:
            raise DcocoError(f"`dcoco serve` needs {error.name}: pip install 'dcoco[serve]'") from error
        raise
    serve(options, listener)


if __name__ == "__main__":
    sys.exit(main())
