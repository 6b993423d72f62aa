"""Prints the table of the fault suite's figures at the end of a run."""

from __future__ import annotations

import pytest

from tests.faults.report import Result, table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if results := config.stash.get(Result.KEY, []):
        terminalreporter.section("faults")
        terminalreporter.write_line(table(results))
