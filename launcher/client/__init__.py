"""A light client of OpenAI-compatible streams, shared by `sonar chat` and `sonar bench serve`."""
