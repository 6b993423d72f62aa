"""Measuring: load over HTTP, the engine offline, one batch's latency. Called by `launcher.cli.bench`."""
