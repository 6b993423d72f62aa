"""Log-probabilities of the model's own distribution: computed on the device for rows that ask, unpacked on the host.

Knows nothing of penalties, filters or slots; the caller passes logits no rule has touched. Called by the sampler (drawn
tokens) and the model runner (prompt tokens).

Legend: N rows that ask, V vocabulary, K alternatives of the row that asks for most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sonar.messages import Logprob


class TokenLogprobs(NamedTuple):
    """Of each row, column 0 the token at hand, then the K most likely.

    Attributes:
        token_NK1: int64. logprob_NK1: float32. rank_N: int64, of the token at hand; 1 = most likely.
    """

    token_NK1: Tensor
    logprob_NK1: Tensor
    rank_N: Tensor


def normalize(logits_NV: Tensor) -> Tensor:
    """Natural log-probabilities of raw logits, float32."""
    return torch.log_softmax(logits_NV, dim=-1, dtype=torch.float32)


def score(logprobs_NV: Tensor, token_N: Tensor, num_alternatives: int) -> TokenLogprobs:
    """Looks up one token a row, its rank, and the most likely tokens.

    Args:
        token_N: int64. num_alternatives: K, 0 for none.
    """
    own_N1 = logprobs_NV.gather(1, token_N[:, None])
    rank_N = (logprobs_NV > own_N1).sum(dim=1) + 1
    if num_alternatives == 0:
        return TokenLogprobs(token_N[:, None], own_N1, rank_N)
    top = logprobs_NV.topk(min(num_alternatives, logprobs_NV.shape[1]), dim=1)
    return TokenLogprobs(
        torch.cat([token_N[:, None], top.indices], dim=1), torch.cat([own_N1, top.values], dim=1), rank_N
    )


def unpack(scored: TokenLogprobs, num_alternatives: list[int]) -> list[list[Logprob]]:
    """Messages of the rows: the token at hand, then as many of the most likely as that row asked for.

    Args:
        scored: on the host. num_alternatives: of each row.
    """
    tokens, values, ranks = scored.token_NK1.tolist(), scored.logprob_NK1.tolist(), scored.rank_N.tolist()
    unpacked = []
    for row, count in enumerate(num_alternatives):
        entries = [Logprob(tokens[row][0], values[row][0], ranks[row])]
        entries += [Logprob(tokens[row][k], values[row][k], k) for k in range(1, min(count + 1, len(tokens[row])))]
        unpacked.append(entries)
    return unpacked
