"""Rotary settings as Hugging Face's config files write them -> `RopeConfig`.

Called by the readers of configurations. Knows nothing of what the numbers do (`sonar.layers.rotary` does). Torch-free.
"""

from __future__ import annotations

from typing import Literal

from sonar.config import RopeConfig
from sonar.config_fields import Fields
from sonar.errors import ModelError

_SCALINGS: dict[str, Literal["none", "linear", "llama3", "yarn"]] = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
}
_NOT_PARAMETERS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


def read_rope(written: Fields, outer: Fields, *, head_dim: int, theta: float) -> RopeConfig:
    """The rotary settings of one layer kind.

    Args:
        written: what `rope_parameters` (for one layer kind) or the older `rope_scaling` holds; may be empty.
        outer: the configuration around it, which holds `rope_theta` and `partial_rotary_factor` in the older form.
        theta: the family's default.

    Raises:
        ModelError: the scaling is unknown, or a parameter of it missing or no number.
    """
    scaling_name = written.get_str("rope_type", written.raw("type") or "default")
    if scaling_name not in _SCALINGS:
        raise ModelError(
            f"{written.where}: rope scaling {scaling_name!r} is not supported; supported are {', '.join(_SCALINGS)}",
            param="model",
        )
    scaling = _SCALINGS[scaling_name]
    share = written.get_float("partial_rotary_factor", outer.get_float("partial_rotary_factor", 1.0))
    dim = int(head_dim * share)
    if not 0 < dim <= head_dim or dim % 2:
        raise ModelError(
            f"{written.where}: partial_rotary_factor={share} of head_dim={head_dim} makes {dim} rotated dimensions; "
            "needed is an even number up to head_dim",
            param="model",
        )
    return RopeConfig(
        theta=written.get_float("rope_theta", outer.get_float("rope_theta", theta)),
        dim=dim,
        scaling=scaling,
        parameters={} if scaling == "none" else _parameters(written, outer, scaling),
    )


def yarn_reach(rope: RopeConfig) -> int:
    """Positions that YaRN's settings were made for."""
    return int(min(rope.parameters["factor"] * rope.parameters["original_max_position_embeddings"], 2.0**31))


def _parameters(written: Fields, outer: Fields, scaling: str) -> dict[str, float]:
    """All numbers the file gives, and the original context's default."""
    parameters = {
        name: written.get_float(name) if not isinstance(value, bool) else float(value)
        for name, value in written.values.items()
        if name not in _NOT_PARAMETERS and isinstance(value, (int, float))
    }
    if scaling in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        outer_length = outer.get_float("max_position_embeddings", 0.0)
        parameters.setdefault(name, outer.get_float(name, outer_length))
    needed = ("factor", "low_freq_factor", "high_freq_factor") if scaling == "llama3" else ("factor",)
    for name in needed:
        if name not in parameters:
            raise written.wrong(name, f"a number, for rope scaling {scaling!r}")
    return parameters
