"""Talks to a running server with the official `openai` package: one answer at once, one streamed.

pip install openai
python examples/openai_client.py [http://127.0.0.1:2242]
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main() -> None:
    """Asks the first model that the server lists."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:2242"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")  # any key does while the server has none
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=32,
        temperature=0,
    )
    print(answer.choices[0].message.content)
    print(answer.usage)

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Count from one to five."}],
        max_tokens=32,
        seed=7,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
