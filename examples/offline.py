"""A model in this process, without any server: several prompts at once, then a conversation streamed.

python examples/offline.py [MODEL]
"""

from __future__ import annotations

import sys

from sonar import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Two plus two equals", "Water boils at"]


def main() -> None:
    """Uses the demo model, which is downloaded the first time, unless another one is named."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    with LLM(model, max_model_len=1024) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=16)
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, greedy), strict=True):
            print(f"{prompt} -> {output.text!r}")

        messages = [{"role": "user", "content": "Name a colour."}]
        for update in llm.stream_chat(messages, SamplingParams(temperature=0.7, seed=1, max_tokens=32)):
            print(update.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
