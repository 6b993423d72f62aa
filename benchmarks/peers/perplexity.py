"""What 8-bit activations cost in quality: perplexity of a fixed text with `--activations int8` against `float32`.

    python benchmarks/peers/perplexity.py TEXT MODEL.gguf [MODEL.gguf ...] [--num-tokens 4000]

TEXT is a plain file, or one of JSON lines, of which the field `answer` is taken (GSM8K's test set is such a file). Its
first tokens go through the engine as prompts of `--window` tokens whose log probabilities are asked for: the kernels,
chunks and cache of serving. The first token of a window is not counted. Prints both perplexities and the rise in %.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from sonar import LLM, SamplingParams


def read_text(path: Path, field: str) -> str:
    """The file's text; of JSON lines the field of each, a blank line between two."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return text
    return "\n\n".join(json.loads(line)[field] for line in text.splitlines() if line.strip())


def cut(token_ids: Sequence[int], window: int) -> list[list[int]]:
    """Windows in order; a last one of a single token, which predicts nothing, is left out."""
    windows = [list(token_ids[start : start + window]) for start in range(0, len(token_ids), window)]
    return [each for each in windows if len(each) > 1]


def perplexity(log_probabilities: Sequence[float]) -> float:
    """exp of the mean negative log probability (natural logarithm)."""
    return math.exp(-math.fsum(log_probabilities) / len(log_probabilities))


def measure(model: str, activations: str, text: str, num_tokens: int, window: int, threads: int) -> tuple[float, int]:
    """Perplexity and how many tokens it is over."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(model, device="cpu", activations=activations, threads=threads, max_model_len=window + 1) as llm:
        windows = cut(llm.tokenizer.encode(text)[:num_tokens], window)
        outputs = llm.generate(windows, sampling)
    # Of each position the token that stands there comes first.
    found = [row[0].logprob for output in outputs for row in output.prompt_logprobs]
    assert len(found) == sum(len(each) - 1 for each in windows), f"{len(found)} log probabilities"
    return perplexity(found), len(found)


def main() -> None:
    """Measures each model both ways and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", metavar="model")
    parser.add_argument("--field", default="answer", help="of JSON lines")
    parser.add_argument("--num-tokens", type=int, default=4000)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    text = read_text(arguments.text, arguments.field)
    print("| model | tokens | float32 | int8 | rise |\n| --- | --- | --- | --- | --- |", flush=True)
    for model in arguments.models:
        exact, rounded = (
            measure(model, mode, text, arguments.num_tokens, arguments.window, arguments.threads)
            for mode in ("float32", "int8")
        )
        rise = rounded[0] / exact[0] - 1
        print(f"| {Path(model).name} | {exact[1]} | {exact[0]:.4f} | {rounded[0]:.4f} | {rise:+.3%} |", flush=True)


if __name__ == "__main__":
    main()
