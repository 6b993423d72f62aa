"""The HTTP API of the head: OpenAI's shapes in front of a `cluster.gateway.Gateway`. Start reading at `app`."""
