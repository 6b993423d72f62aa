"""The `sonar` command, one module a subcommand."""
