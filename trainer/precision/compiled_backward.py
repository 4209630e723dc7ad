"""Has ``torch.compile`` make backward passes that run outside of autocast, as they do in modules that are not compiled.

The compiler traces the backward pass together with the forward pass, under its autocast, and by default keeps autocast
on in it. What runs in float32 (``fp32_modules``, or inside ``torch.autocast(..., enabled=False)``) then gets gradients
whose products were computed in 16 bits, where they overflow or vanish.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

from torch._functorch import config

_SETTING, _USUAL = "backward_pass_autocast", "same_as_forward"


def without_autocast() -> AbstractContextManager[object]:
    """A context in which what is compiled has no autocast in its backward pass, unless a user has set otherwise."""
    if getattr(config, _SETTING, None) != _USUAL:
        return nullcontext()
    return cast(AbstractContextManager[object], config.patch(**{_SETTING: "off"}))
