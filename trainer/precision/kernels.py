"""Replace torch's kernels while a context is open."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.library import Library, get_kernel

from trainer.precision.compilation import keep_out_of_graphs

Kernel = Callable[..., Any]
"""Takes the set of dispatch keys first, then the operation's arguments."""


def own_kernel(name: str, key: str) -> Kernel:
    """Return the kernel that torch has registered for ``aten::name`` at a dispatch key."""
    return get_kernel(f"aten::{name}", key).call_boxed


class Replaced(NamedTuple):
    """The kernels of one operation.

    Attributes:
        original: torch's own kernel.
        replacement: the kernel that is called while a context :meth:`Replacement.used` is open.
    """

    original: Kernel
    replacement: Kernel


class Replacement:
    """Replacement kernels for operations of torch at one dispatch key. Active while a context :meth:`used` is open.

    They are registered at the first use and stay registered, because removing a kernel while another thread runs it
    crashes the process. While no context is open, they forward each call to torch's own kernel: the results are the
    same, bit for bit, and each call costs some microseconds of Python.

    Args:
        key: the dispatch key.
        make: returns the kernels by the names of their operations (``mm``, ``sum.dim_IntList``). If another replacement
            is registered for an operation, its kernel counts as torch's own.
    """

    def __init__(self, key: str, make: Callable[[], Mapping[str, Replaced]]) -> None:
        self.users = 0
        self._key = key
        self._make = make
        self._lock = threading.Lock()
        self._library: Library | None = None
        self._registered: Mapping[str, Replaced] | None = None

    @property
    def kernels(self) -> Mapping[str, Replaced]:
        """The kernels by the names of their operations: the registered ones, or new ones before the first use."""
        return self._registered or self._make()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use the kernels in all threads, including autograd's, in this context. Contexts may nest or overlap."""
        with self._lock:
            if self._library is None:
                self._library = self._install()
            self.users += 1
        try:
            yield
        finally:
            with self._lock:
                self.users -= 1

    def _install(self) -> Library:
        library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._registered = self._make()  # now, because another replacement may be registered since `kernels` was read
        with warnings.catch_warnings():
            # torch warns once per process that a kernel is overridden, which is intended here.
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid", category=UserWarning)
            for name, replaced in self._registered.items():
                library.impl(name, self._switch(*replaced), self._key, with_keyset=True)  # type: ignore[no-untyped-call]
        return library

    def _switch(self, original: Kernel, replacement: Kernel) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            return (replacement if self.users else original)(*args, **kwargs)

        def kernel_below_autograd(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_anomaly_enabled():
                return kernel(*args, **kwargs)
            # Some kernels of torch run in several threads, which create autograd nodes. In anomaly detection, these
            # threads need the GIL to record the line of code, but this thread holds the GIL while it waits for them.
            with torch.autograd.set_detect_anomaly(False):
                return kernel(*args, **kwargs)

        switched = kernel_below_autograd if self._key == "CPU" else kernel
        keep_out_of_graphs(switched)  # torch.compile cannot trace torch's kernels
        return switched
