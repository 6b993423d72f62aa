"""Which request makes replicas die: a pure rule over strikes.

Every crash is a strike against the requests that were there, unless they had made progress since their last one: what
kills a replica at some token kills the next one at the same token. At two strikes a request is suspect. A sole suspect
with most strikes is convicted; while several tie, each is sent alone among suspects (`cluster.requests` sees to that),
so that the next crash, or its absence, tells. A host that is lost, or a stop that was asked for, strikes nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SUSPECT_AT = 2
# Tokens beyond the last crash after which a request has shown that it was not the cause.
PROGRESS_TOKENS = 8


@dataclass
class Strikes:
    """A request's record. at_token: tokens it had out at the last strike."""

    count: int = 0
    at_token: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether it has to be sent alone among suspects."""
        return self.count >= SUSPECT_AT

    def clear_by_progress(self, num_emitted: int) -> bool:
        """Forgets the strikes once there is progress past them; returns whether a suspicion was lifted."""
        if not self.count or num_emitted < self.at_token + PROGRESS_TOKENS:
            return False
        was_suspect = self.is_suspect
        self.count = 0
        return was_suspect


def strike_all(present: Sequence[tuple[Strikes, int]]) -> int | None:
    """A replica crashed: a strike for each request that was there.

    Args:
        present: record and number of emitted tokens of each.
    Returns:
        The index of the convicted one, or None.
    """
    for strikes, num_emitted in present:
        strikes.clear_by_progress(num_emitted)
        strikes.count += 1
        strikes.at_token = num_emitted
    most = max((strikes.count for strikes, _ in present), default=0)
    worst = [index for index, (strikes, _) in enumerate(present) if strikes.count == most]
    return worst[0] if most >= SUSPECT_AT and len(worst) == 1 else None
