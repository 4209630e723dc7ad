"""``trainer export``: write a trained module as a graph, or its weights, for use without this package.

The suffix of the file selects the graph of the module's ``forward`` (`trainer.cli.exported_graphs`) or the weights.
Weights are copied from the checkpoint without the config of the run.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.cli.consolidate import check_new, run_conversion
from trainer.cli.parsing import Arguments, UsageError
from trainer.common import packages
from trainer.record.find_checkpoint import find

WEIGHTS = ".safetensors"
GRAPHS = (".onnx", ".pt2")
"""Suffixes of files with graphs."""
_EXTRAS = {WEIGHTS: "safetensors", ".onnx": "export"}


def command(arguments: Arguments) -> int:
    """Run ``export ckpt=RUN to=FILE [SETTING=VALUE]`` or ``export ckpt=RUN to=FILE.safetensors [prefix=PREFIX]``.

    Raises:
        ExportError: if the module cannot be exported, or the outputs of the file differ from those of the module.
    """
    arguments.check_flags()
    given = {word.partition("=")[0]: word.partition("=")[2].strip("'\"") for word in arguments.overrides}
    file = _writable(Path(given.pop("to", "")).expanduser())
    arguments.overrides = [word for word in arguments.overrides if not word.startswith("to=")]
    if file.suffix != WEIGHTS:
        return _graph(arguments, file)
    prefix = given.pop("prefix", "")
    if len(given) != 1 or not given.keys() <= {"ckpt", "ckpt_path"}:
        raise UsageError(
            f"export to a {WEIGHTS} file got {' '.join(arguments.overrides) or 'no checkpoint'}, expected"
            f" ckpt=RUN to=FILE{WEIGHTS} and maybe prefix=PREFIX: it copies the weights from the checkpoint."
        )
    return _weights(find(Path(*given.values()).expanduser()), file, prefix)


def _writable(file: Path) -> Path:
    """Return ``file`` if it can be written.

    Raises:
        UsageError: if its suffix is unknown, it exists, or a package is missing.
    """
    if file.suffix not in (WEIGHTS, *GRAPHS):
        raise UsageError(
            f"export got {file if file.name else 'no file to write'}, expected to=FILE with a name that ends in"
            f" {', '.join(GRAPHS)} or {WEIGHTS}, such as to=model.pt2."
        )
    check_new(file)
    if file.suffix in _EXTRAS and (problem := packages.missing(_EXTRAS[file.suffix])):
        raise UsageError(f"export needs {problem}")
    return file


def _weights(checkpoint: Path, file: Path, prefix: str) -> int:
    def convert() -> str:
        from trainer.checkpoint.conversion import export, weights_of

        weights = weights_of(checkpoint, prefix)
        export(weights, file)
        return f" {len(weights)} tensors."

    return run_conversion(convert, file)


def _graph(arguments: Arguments, file: Path) -> int:
    from trainer.cli import restore
    from trainer.cli.config_checks import validate
    from trainer.cli.tune import plain

    restore.apply(arguments)
    config = validate(arguments)
    if config.ckpt_path is None:
        raise UsageError("export got no checkpoint, expected ckpt=RUN: the folder of a run, or a checkpoint in it.")
    from trainer.cli.execution import assemble
    from trainer.cli.exported_graphs import export

    with TemporaryDirectory() as folder:
        settings = plain(config, Path(folder))
        settings |= {
            "callbacks": {},
            "precision": {"_target_": "trainer.precision.FullPrecision"},
            "weights": None,
            "trainer": settings["trainer"] | {"accelerator": "cpu", "limit_val_batches": None},
        }
        module, data, trainer = assemble(settings, Path(folder))
        print(export(trainer, module, data, config.ckpt_path, file), flush=True)
    return 0
