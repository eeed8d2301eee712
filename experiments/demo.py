"""What dcoco does, in a minute: a few prompts, plain and with drafts, accepted draft tokens in colour, and the speed.

python -m experiments.demo [--target smollm2_135m] [--max-tokens 96]
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcoco import DCOCODecoder, RequestOutput, SamplingParams

PROMPTS = (
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?",
    "Write a Python function that checks whether a string is a palindrome.",
    "Why is the sky blue?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2_135m")
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    console = Console(width=110)
    console.print(f"loading {arguments.target} (the first time, its weights are fetched) ...")
    decoder = DCOCODecoder.from_pretrained(arguments.target, max_rows=1)  # costs of one row are measured at once
    console.print(
        f"{decoder.target.dtype}, drafter with blocks of {decoder.drafter.block_size if decoder.drafter else 0}\n"
    )
    params = SamplingParams(max_tokens=arguments.max_tokens)
    decoder.generate("Hello", SamplingParams(max_tokens=16))  # warm up
    decoder.generate("Hello", SamplingParams(max_tokens=4), method="plain")

    table = Table("prompt", "plain", "dcoco", "speed-up", "acceptance length", "same text")
    for prompt in PROMPTS:
        question = [{"role": "user", "content": prompt}]
        plain = decoder.generate([question], params, method="plain")[0]
        fast = decoder.generate([question], params, trace=True)[0]
        console.print(f"[bold]{prompt}[/bold]")
        console.print(coloured(decoder, fast))
        console.print()
        plain_rate, fast_rate = plain.stats.tokens_per_second, fast.stats.tokens_per_second
        table.add_row(
            prompt[:40] + "...",
            f"{plain_rate:.0f} tokens/s",
            f"{fast_rate:.0f} tokens/s",
            f"{fast_rate / plain_rate:.2f}x",
            f"{fast.stats.mean_acceptance_length:.2f}",
            compare(decoder, plain, fast),
        )
    console.print("[green]drafted and accepted[/green]; the rest came from the target itself\n")
    console.print(table)


def coloured(decoder: DCOCODecoder, output: RequestOutput) -> Text:
    """The text, with the tokens that were drafted and accepted in green."""
    drafted = [False] * len(output.token_ids)
    for trace in output.trace or ():
        for index in range(trace.start, trace.start + trace.accepted):
            drafted[index] = True
    text = Text()
    begin = 0
    for end in range(1, len(drafted) + 1):  # runs of one kind are decoded together, so characters stay whole
        if end == len(drafted) or drafted[end] != drafted[begin]:
            piece = decoder.tokenizer.decode(output.token_ids[begin:end], skip_special_tokens=True)
            text.append(piece, style="green" if drafted[begin] else "")
            begin = end
    return text


def compare(decoder: DCOCODecoder, plain: RequestOutput, fast: RequestOutput) -> str:
    """Whether both texts are the same; in bfloat16 a near-tie may part them, then where."""
    for index, (a, b) in enumerate(zip(plain.token_ids, fast.token_ids, strict=False)):
        if a != b:
            words = [decoder.tokenizer.decode([token]) for token in (a, b)]
            reason = "rounding decides near-ties" if decoder.target.dtype != torch.float32 else "this should not be"
            return f"until token {index}: {words[0]!r} / {words[1]!r} ({decoder.target.dtype}: {reason})"
    return "yes" if len(plain.token_ids) == len(fast.token_ids) else "one is longer"


if __name__ == "__main__":
    main()
