"""The wait for the first hosts: who is here, who is missing, and when the wait is over. Pure; no socket, no clock.

Until it is over no replica is placed: the first host to join would get all of them. After the deadline the missing are
named and the cluster goes on with those that are here (or ends, if so configured). Owned by `cluster.state`.
"""

from __future__ import annotations

from collections.abc import Collection

from cluster.config import NodesConfig


class RollCall:
    """Owner of the wait; it happens once in a head's life.

    Attributes:
        is_over: replicas may be placed. failure: set when hosts were missing at the deadline.
    """

    def __init__(self, config: NodesConfig) -> None:
        self.is_over = not config.expected and not config.min
        self.failure = ""
        self._config = config
        self._deadline_s: float | None = None

    def missing(self, here: Collection[str]) -> list[str]:
        """Expected nodes that are not here, by name; then how many more are needed, whatever their names."""
        names = [name for name in self._config.expected if name not in here]
        short = self._config.min - len(here) - len(names)
        return [*names, *([f"{short} more of any name"] if short > 0 else [])]

    def tick(self, here: Collection[str], now: float) -> str:
        """Time has passed, or somebody came. Returns what is to be announced when the wait ends, else nothing."""
        if self.is_over:
            return ""
        if self._deadline_s is None:
            self._deadline_s = now + self._config.join_timeout_s
        missing = self.missing(here)
        if missing and now < self._deadline_s:
            return ""
        self.is_over = True
        if not missing:
            return f"roll call: all nodes are here: {', '.join(sorted(here))}"
        self.failure = (
            f"roll call after {self._config.join_timeout_s:g} s: missing {', '.join(missing)}; "
            f"here: {', '.join(sorted(here)) or 'none'}; look at the output of `sonar join` on the missing hosts"
        )
        return self.failure

    def note(self, here: Collection[str]) -> str:
        """Why a replica has no place yet."""
        return f"waits for nodes: {', '.join(self.missing(here))}"
