"""Metrics of the answers that outlive their connections, read from their owners at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.answer_journal import AnswerJournal
from cluster.api.live_answers import LiveAnswers


class JournalMetrics(Collector):
    """Puts the journal's figures into a registry."""

    def __init__(self, journal: AnswerJournal, answers: LiveAnswers) -> None:
        self._journal = journal
        self._answers = answers

    def describe(self) -> list[Metric]:
        """Nothing: `collect` needs no dry run at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families, from the figures of this moment."""
        counters = self._journal.counters
        for name, text, value in (
            ("sonar_live_answers", "Resumable answers being computed", self._answers.num_live),
            ("sonar_journal_answers", "Answers in the journal, ended ones too", self._journal.num_answers),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, figure in (
            ("sonar_answers_readmitted", "Answers of an earlier head that went on", self._answers.num_readmitted),
            ("sonar_journal_updates", "Updates written down", counters.updates),
            ("sonar_journal_commits", "Transactions", counters.commits),
            ("sonar_journal_commit_seconds", "Time in transactions", counters.commit_seconds),
            ("sonar_journal_failures", "Transactions that were lost", counters.failures),
        ):
            yield CounterMetricFamily(name, text, value=figure)
