#!/usr/bin/env bash
# Kills the process that computes a stream while it streams, and compares what the client got with an unbroken run.
#   examples/survive_a_crash.sh [PORT]      (of a server started with `sonar serve` or the demo, on this machine)
set -euo pipefail
PORT=${1:-2242}
BODY='{"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 120, "seed": 5, "stream": true,
       "ignore_eos": true}'

stream() { curl --fail --silent --show-error --no-buffer "http://127.0.0.1:$PORT/v1/completions" -d "$BODY"; }
texts() { python -c '
import json, sys
events = [line[6:] for line in sys.stdin if line.startswith("data: {")]
print("".join(choice["text"] for event in events for choice in json.loads(event)["choices"]))'; }

unbroken=$(stream | texts)

received=$(mktemp)
trap 'rm -f "$received"' EXIT
stream >"$received" &
while (($(grep -c '^data' "$received" || true) < 10)); do sleep 0.02; done
worker=$(sonar status --port "$PORT" | sed -n 's/.*worker pid \([0-9]*\).*/\1/p')
kill -KILL "$worker"
echo "killed worker $worker after $(grep -c '^data' "$received") events; the stream goes on:"
wait %%
continued=$(texts <"$received")
echo "$continued"

if [ "$continued" = "$unbroken" ]; then
    echo "It is the same text, token for token, as without the crash."
else
    echo "It differs from the run without the crash: $unbroken" >&2
    exit 1
fi
