"""Numbers in a model's config, which may be a stranger's: what is written from them is code's to read, so they must be some."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from meshload.errors import LayoutError

from ._json import short


def number(config: Mapping[str, Any], *keys: str) -> int | float | None:
    """Return the number under the first of some keys that is there; None where none is. Anything else raises.

    >>> number({"rope_theta": None, "rotary_emb_base": 10000}, "rope_theta", "rotary_emb_base")
    10000
    """
    for key in keys:
        found = config.get(key)
        if isinstance(found, int | float) and type(found) is not bool and abs(found) <= sys.float_info.max:
            return found
        if found is not None:
            raise LayoutError(f"config: {key} is {short(found)}, a finite number was expected")
    return None


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key; an empty one where none is there. Anything else raises."""
    found = config.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise LayoutError(f"config: {key} is {short(found)}, an object was expected")
    return found or {}
