"""Overrides with the values of one run, so that a printed command repeats that run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer import redaction
from trainer.cli.walk import walk

_RUN_SPECIFIC = re.compile(r"\$\{(?:hydra:job\.|now:)[^${}]*\}")
_JOB_NUMBER = re.compile(r"\$\{hydra:job\.(?:num|id)\}")
_KEPT_INTERPOLATION = re.compile(r"\$\{hydra:(?!job\.)")  # such as the folder of the run
_PLAIN = re.compile(r"(?!(?:null|true|false|inf|nan)$)[a-z_][a-z0-9_./-]*", re.IGNORECASE)


def with_values(words: Sequence[str], config: DictConfig) -> list[str]:
    """Return overrides in which each interpolation is replaced by its value in a run.

    Values from the environment (``${oc.env:NAME}``) and folders of the run (``${hydra:runtime.output_dir}``) stay
    interpolations: the former may be secrets, and another run has other folders. An
    override is added for each setting of ``config`` that contains the number of the job and that no override sets.

    Args:
        words: the overrides that ``config`` was composed with, without those of Hydra.
        config: unresolved config of the run, without the node ``hydra``, which is read from ``HydraConfig``.
    """
    parser = OverridesParser.create()
    parsed = [(word, parser.parse_override(word)) for word in words]
    written = [word if one.is_delete() else _with_value(word, one, config) for word, one in parsed]
    for key, _, raw, _ in walk(OmegaConf.to_container(config, resolve=False), into_lists=False):
        if isinstance(raw, dict) or not re.fullmatch(r"[\w/.-]+", key):
            continue
        is_set = any(_sets(override, key) for _, override in parsed)
        if _JOB_NUMBER.search(str(raw)) and not is_set and (value := _value_of(raw, config)) != raw:
            written.append(_format_override(parser.parse_override(f"{key}=null"), value))
    return written


def _with_value(word: str, override: Override, config: DictConfig) -> str:
    raw: Any = override.value()
    value = _value_of(raw, config)
    return word if value == raw else _format_override(override, value)


def _sets(override: Override, key: str) -> bool:
    own = override.key_or_group
    return key == own or (key.startswith(f"{own}.") and isinstance(override.value(), dict))


def _value_of(raw: Any, config: DictConfig) -> Any:
    """Return ``raw`` with interpolations replaced by their values, or unchanged if one has no value."""
    if isinstance(raw, dict):
        return {key: _value_of(child, config) for key, child in raw.items()}
    if isinstance(raw, list):
        return [_value_of(child, config) for child in raw]
    if not isinstance(raw, str) or "${" not in raw:
        return raw
    try:
        if _KEPT_INTERPOLATION.search(raw):
            return _RUN_SPECIFIC.sub(lambda found: str(_resolved(found[0], config)), raw)
        value = redaction.containers(_resolved(raw, config))
    except OmegaConfBaseException:  # the run reports this error
        return raw
    return raw if "${" in str(value).replace("${oc.env:", "") else value


def _resolved(text: str, config: DictConfig) -> Any:
    node = OmegaConf.create({"value": text}, parent=config)
    return OmegaConf.to_container(node, resolve=True)["value"]  # type: ignore[index, call-overload]


def _format_override(override: Override, value: Any) -> str:
    """Return the override with another value."""
    changed = replace(override, _value=_quoted(value))
    return f"{changed.get_key_element()}={changed.get_value_element_as_str()}"


def _quoted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _quoted(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_quoted(child) for child in value]
    is_plain = not isinstance(value, str) or _PLAIN.fullmatch(value)
    return value if is_plain else QuotedString(value, Quote.single)
