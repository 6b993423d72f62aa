#!/usr/bin/env bash
# Streams one completion with nothing but curl: each line is an event as it leaves the engine.
#   examples/streaming_curl.sh [http://127.0.0.1:2242]
set -euo pipefail
URL=${1:-http://127.0.0.1:2242}

curl --fail --silent --show-error --no-buffer "$URL/v1/completions" \
    -H 'Content-Type: application/json' \
    -d '{
        "model": "smollm2-135m",
        "prompt": "The three primary colours are",
        "max_tokens": 24,
        "temperature": 0,
        "stream": true,
        "stream_options": {"include_usage": true}
    }'
