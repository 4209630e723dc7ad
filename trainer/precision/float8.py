"""``fp8-mixed``: ``bf16-mixed`` with Linear layers that multiply in 8 bits, through torchao's float8 training.

torchao replaces ``nn.Linear`` with its own class. Here the class of a layer stays the same, and only its ``forward`` is
replaced during a run, as in :mod:`~trainer.precision.fp32_modules`. Thus wrappers, compiled modules, copies and other
references have the same layer before, during and after the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.common import packages
from trainer.common.module_tree import all_modules, plain_class, plain_name
from trainer.common.session import Session
from trainer.errors import PrecisionError, expect
from trainer.precision.fp32_modules import check_patterns, find_modules
from trainer.precision.mixed import MixedPrecision

MULTIPLE = 16
"""Required divisor of a layer's sizes, from ``torch._scaled_mm``, which computes the products on a GPU."""
_CAPABILITY = (8, 9)  # the oldest GPUs with float8 products: Ada and Hopper
_RUN = "_in_float8"
"""Attribute of a chosen layer during a run: torchao's forward."""


class Float8Precision(MixedPrecision):
    """bfloat16 autocast with Linear layers that multiply in float8.

    The operands of each matrix product (inputs, weights or gradients) are scaled by their own largest value (dynamic
    scaling) and rounded to 8 bits (Micikevicius et al. 2022, FP8 Formats for Deep Learning). Everything else is as in
    ``bf16-mixed``: weights, gradients and optimizer states are float32, the loss is not scaled, and checkpoints are the
    same. Requires torchao (``pip install torchao``). According to torchao, it is faster than ``bf16-mixed`` for large
    layers in a compiled model (``compile=default``). Without a GPU it is emulated, which is slow: only for tests.

    Args:
        recipe: torchao's name for how values share a scale. ``"tensorwise"``: one scale for each tensor, with gradients
            in e5m2 and the rest in e4m3. ``"rowwise"``: one scale for each row, all in e4m3.
            ``"rowwise_with_gw_hp"``: like ``"rowwise"``, but the gradients of weights are computed in bfloat16, and the
            gradient of the input uses one scale for the whole weight. Default: ``"tensorwise"``.
        modules: the ``nn.Linear`` layers to convert, by name or pattern as in ``fp32_modules``. Only layers with sizes
            that are multiples of 16 compute in float8; subclasses of ``nn.Linear`` and the projections of
            ``nn.MultiheadAttention`` do not. See :meth:`layers`. Default: ``"*"``, all layers.
        fp32_modules: see :class:`MixedPrecision`. Modules in float32 do not run in float8.
        autocast_ops: see :class:`MixedPrecision`.
        autocast_cache: see :class:`MixedPrecision`.

    Raises:
        PrecisionError: if the recipe is unknown, or a pattern is not a string.
    """

    names = {"fp8-mixed": {}}

    def __init__(
        self,
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
        modules: str | Sequence[str] = "*",
        fp32_modules: str | Sequence[str] = (),
        autocast_ops: Literal["native", "cuda"] = "native",
        autocast_cache: bool | None = None,
    ) -> None:
        super().__init__(
            "bfloat16", fp32_modules=fp32_modules, autocast_ops=autocast_ops, autocast_cache=autocast_cache
        )
        known = "'tensorwise', 'rowwise' or 'rowwise_with_gw_hp'"
        expect(recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"), known, PrecisionError, recipe=recipe)
        self.name = "fp8-mixed"
        self.recipe = recipe
        self.modules = check_patterns(modules, "modules")

    def check(self, device: torch.device) -> None:
        """Raise if the device does not support float8, or torchao is not installed.

        Raises:
            PrecisionError: if float8 or torchao is not available.
        """
        if problem := packages.missing("fp8"):
            raise PrecisionError(f"precision='fp8-mixed' needs {problem}. Without it, use precision='bf16-mixed'.")
        if device.type not in ("cpu", "cuda"):
            raise PrecisionError(
                f"Got precision='fp8-mixed' on a device of type {device.type!r}, expected cuda, or cpu, where it is"
                " emulated. Use precision='bf16-mixed'."
            )
        if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY:
            raise PrecisionError(
                f"Got precision='fp8-mixed' on a GPU of compute capability {capability[0]}.{capability[1]}, expected"
                " 8.9 or newer (Ada, Hopper, Blackwell): older ones have no products in float8. Use"
                " precision='bf16-mixed'."
            )
        super().check(device)

    def layers(self, module: nn.Module) -> tuple[dict[str, nn.Linear], dict[str, str]]:
        """Return the layers that compute in float8, by name, and the reasons why other layers in ``modules`` do not.

        Raises:
            PrecisionError: if a pattern of ``modules`` matches no Linear layer, or one of ``fp32_modules`` no module.
        """
        in_full = all_modules(*find_modules(module, self.fp32_modules))
        linear = {plain_name(path): layer for path, layer in module.named_modules() if isinstance(layer, nn.Linear)}
        for pattern in self.modules:
            if linear and not any(fnmatchcase(name, pattern) for name in linear):
                raise PrecisionError(
                    f"modules: {pattern!r} matches no Linear layer of {type(module).__name__}. It has:"
                    f" {', '.join(list(linear)[:12])}{' ...' if len(linear) > 12 else ''}."
                )
        chosen: dict[str, nn.Linear] = {}
        others: dict[str, str] = {}
        for name, layer in linear.items():
            if not any(fnmatchcase(name, pattern) for pattern in self.modules):
                continue
            sizes = f"{layer.in_features} x {layer.out_features}"
            if layer in in_full:
                others[name] = "is in fp32_modules"
            elif plain_class(layer) is not nn.Linear:
                others[name] = f"is a {plain_class(layer).__name__}"
            elif "forward" in vars(layer):
                others[name] = "has its own forward"
            elif layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
                others[name] = f"is {sizes}: not multiples of {MULTIPLE}"
            else:
                chosen[name] = layer
        return chosen, others

    @contextmanager
    def session(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Set up ``bf16-mixed``, and compute the chosen layers in float8 while the context is open.

        Raises:
            PrecisionError: if no layer can compute in float8.
        """
        chosen, others = self.layers(module)
        if not chosen:
            reasons = "; ".join(f"{name} {reason}" for name, reason in list(others.items())[:6]) or "it has none"
            raise PrecisionError(
                f"Got precision='fp8-mixed' and no Linear layer of {type(module).__name__} that can compute in float8:"
                f" {reasons}. Use precision='bf16-mixed', or make their sizes multiples of {MULTIPLE}."
            )
        with super().session(module, device), in_float8(chosen.values(), self._settings(device)):
            yield

    @property
    def _advice(self) -> str:
        return "Trainer(precision=Float8Precision({}))"

    def _settings(self, device: torch.device) -> Mapping[str, Any]:
        """Return the attributes that torchao adds to a Linear layer, and the forward that uses them."""
        with _quiet():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(self.recipe)
        # a batch may have any size: if it is an inner dimension of a product, it is padded with zeros
        config = replace(config, emulate=device.type != "cuda", pad_inner_dim=True)
        with torch.device("meta"):
            plain = nn.Linear(MULTIPLE, MULTIPLE)
            (converted,) = convert_to_float8_training(nn.Sequential(nn.Linear(MULTIPLE, MULTIPLE)), config=config)
        added = {name: value for name, value in vars(converted).items() if name not in vars(plain)}
        return {**added, _RUN: type(converted).forward}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's messages about types that torchao registers while it is imported."""
    logger = logging.getLogger("torch.utils._pytree")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def in_float8(layers: Iterable[nn.Linear], settings: Mapping[str, Any]) -> Iterator[None]:
    """Run the forward of each layer in float8 while the context is open."""
    with Session() as session:
        session.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # it uses the weights of layers without calling them
        for layer in layers:
            vars(layer).update(settings)
            for name in settings:
                session.callback(vars(layer).pop, name, None)
            session.replace(layer, "forward", MethodType(forward, layer))
        yield


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """Replace ``forward`` of a chosen layer. One function for all layers; pickle requires this name."""
    run = getattr(self, _RUN, None)
    if run is None:  # the run is over
        return type(self).forward(self, input)
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type):
        input = input.to(torch.get_autocast_dtype(device_type))  # torchao itself only reads CUDA's dtype
    output: Tensor = run(self, input)
    return output
