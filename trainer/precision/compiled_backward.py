"""Backward passes that ``torch.compile`` makes are those of a loop that runs backward outside of autocast.

The compiler makes the backward pass together with the forward, while autocast is on there, and by default it takes it
to be on in the backward pass as well. Products in the backward pass of what runs in float32 (``fp32_modules``, or
inside ``torch.autocast(..., enabled=False)``) are then computed in 16 bits, where gradients overflow or vanish.
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
