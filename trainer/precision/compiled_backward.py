"""Let ``torch.compile`` create backward passes that run without autocast, as in modules that are not compiled.

The compiler traces the backward pass together with the forward pass. By default, it keeps the forward's autocast
enabled in the backward pass. Modules in float32 (``fp32_modules``, or inside ``torch.autocast(..., enabled=False)``)
then get gradients with products computed in 16 bits, which may overflow or underflow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

from torch._functorch import config

_SETTING, _USUAL = "backward_pass_autocast", "same_as_forward"


def without_autocast() -> AbstractContextManager[object]:
    """Return a context that compiles backward passes without autocast, unless the user has changed torch's setting."""
    if getattr(config, _SETTING, None) != _USUAL:
        return nullcontext()
    return cast(AbstractContextManager[object], config.patch(**{_SETTING: "off"}))
