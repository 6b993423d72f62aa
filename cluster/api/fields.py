"""Which names a request body may carry: the rule that no field is ignored in silence.

A name is served, or inert (OpenAI's bookkeeping fields, listed here), or refused by name. A refused field passes with
the value that means "off", so that a client which always sends it still works. Pure; knows no types of served fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.api.errors import ApiError, invalid

# OpenAI's fields that change no token: identity, billing, caching and speed hints.
INERT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
    }
)


@dataclass(frozen=True)
class Refused:
    """A known name that is not served. off: values that change nothing and pass; any_value: it only tunes a field that
    is itself refused unless off."""

    reason: str
    off: tuple[Any, ...] = ()
    any_value: bool = False


def _sampler(*off: Any) -> Refused:
    return Refused("this sampler is not supported", off)


_COMPANION = Refused("", any_value=True)
_TOOLS = "tools are not supported yet"

REFUSED: dict[str, Refused] = {
    "tools": Refused(f'{_TOOLS}; send tool_choice="none" or leave them out', ([],)),
    "tool_choice": Refused(f'{_TOOLS}; send "none" or leave it out', ("none",)),
    "functions": Refused(f"{_TOOLS}; leave it out", ([],)),
    "function_call": Refused(f'{_TOOLS}; send "none" or leave it out', ("none",)),
    "audio": Refused("audio is not supported"),
    "modalities": Refused('only ["text"] is supported', (["text"],)),
    "moderation": Refused("moderation is not supported"),
    "verbosity": Refused('only "medium" is supported', ("medium",)),
    "web_search_options": Refused("web search is not supported"),
    "suffix": Refused("filling in before a suffix is not supported; leave it out", ("",)),
    "use_beam_search": _sampler(False),
    "length_penalty": _sampler(1),
    "early_stopping": _sampler(False),
    "truncate_prompt_tokens": Refused("prompts are never cut; shorten the prompt"),
    "spaces_between_special_tokens": Refused("only true is supported", (True,)),
    "guided_json": Refused("structured output is not supported yet"),
    "guided_regex": Refused("structured output is not supported yet"),
    "guided_choice": Refused("structured output is not supported yet"),
    "guided_grammar": Refused("structured output is not supported yet"),
    "structured_outputs": Refused("structured output is not supported yet"),
    "grammar": Refused("structured output is not supported yet", ("",)),
    "json_schema": Refused("structured output is not supported yet"),
    "dynatemp_range": _sampler(0),
    "dynatemp_min": _sampler(0),
    "dynatemp_max": _sampler(0),
    "dynatemp_exponent": _COMPANION,
    "nsigma": _sampler(0),
    "top_n_sigma": _sampler(0, -1),
    "top_a": _sampler(0),
    "tfs": _sampler(1),
    "tfs_z": _sampler(1),
    "eta_cutoff": _sampler(0),
    "epsilon_cutoff": _sampler(0),
    "smoothing_factor": _sampler(0),
    "smoothing_curve": _COMPANION,
    "xtc_probability": _sampler(0),
    "xtc_threshold": _COMPANION,
    "mirostat": _sampler(0),
    "mirostat_mode": _sampler(0),
    "mirostat_tau": _COMPANION,
    "mirostat_eta": _COMPANION,
    "dry_multiplier": _sampler(0),
    "dry_base": _COMPANION,
    "dry_allowed_length": _COMPANION,
    "dry_sequence_breakers": _COMPANION,
    "dry_range": _COMPANION,
    "dry_penalty_last_n": _COMPANION,
    "no_repeat_ngram_size": _sampler(0),
    "skew": _sampler(0),
    "temperature_last": _sampler(False),
    "sampler_order": _sampler(),
    "samplers": _sampler(),
}

# Names other servers give to fields that are served here.
OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "rep_pen": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
    "typical": "typical_p",
    "sampler_seed": "seed",
    "random_seed": "seed",
    "stop_sequence": "stop",
    "stop_sequences": "stop",
    "custom_token_bans": "logit_bias",
    "n_probs": "logprobs",
}


def check_fields(raw: Mapping[str, msgspec.Raw], served: frozenset[str], ignored: Iterable[str] = ()) -> None:
    """Raise a 400 that names the first field which is neither served, inert nor off.

    Args:
        raw: the body's top level, values still encoded.
        served: field names of the endpoint's struct.
        ignored: further names the operator lets through.
    """
    passed = served | INERT | frozenset(ignored)
    for name, value in raw.items():
        if name in passed or bytes(value) == b"null":
            continue
        refused = REFUSED.get(name)
        if refused is None:
            raise _unknown(name, served)
        if refused.any_value or (name == "tools" and _tool_choice_is_none(raw)):
            continue
        given = _decoded(value)
        if not any(type(given) is type(off) and given == off for off in _with_floats(refused.off)):
            raise invalid(f"{name}: {refused.reason}{_off_hint(refused)}", param=name, code="unsupported_parameter")


def _unknown(name: str, served: frozenset[str]) -> ApiError:
    """The refusal of an unknown name, with the nearest served one and with what is served."""
    near = OTHER_NAMES.get(name)
    if near not in served:
        near = next(iter(difflib.get_close_matches(name, served, n=1, cutoff=0.75)), None)
    hint = f"; did you mean {near}?" if near else "."
    return invalid(
        f"unknown field {name[:100]!r}{hint} Served here: {', '.join(sorted(served))}",
        param=name[:100],
        code="unknown_parameter",
    )


def _tool_choice_is_none(raw: Mapping[str, msgspec.Raw]) -> bool:
    choice = raw.get("tool_choice")
    return choice is not None and _decoded(choice) == "none"


def _decoded(value: msgspec.Raw) -> Any:
    return msgspec.json.decode(value)


def _with_floats(values: tuple[Any, ...]) -> list[Any]:
    """Off values with 0 and 1 as floats too; booleans stay booleans."""
    return [*values, *(float(v) for v in values if type(v) is int)]


def _off_hint(refused: Refused) -> str:
    if not refused.reason.startswith("this sampler"):
        return ""
    shown = " or ".join(msgspec.json.encode(v).decode() for v in refused.off)
    return f"; leave it out or send {shown}" if shown else "; leave it out"
