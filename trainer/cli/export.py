"""``trainer export``, ``consolidate`` and ``shard``: write a trained module, or a checkpoint, in another format.

``export`` writes the graph of the module's ``forward`` (`trainer.cli.exported_graphs`) or the weights, as the suffix of
the file selects. Weights are copied from the checkpoint without the config of the run. ``consolidate`` converts a
sharded checkpoint to one file, and ``shard`` one file to a folder.

torch is imported only for the conversion, after the arguments are checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.checkpoint.sharded_files import MANIFEST
from trainer.cli.parsing import Arguments, UsageError
from trainer.common import packages
from trainer.common.terminal import command_line
from trainer.errors import CheckpointError, CheckpointWriteError
from trainer.record.find_checkpoint import find, is_checkpoint_folder

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
    file = Path(given.pop("to", "")).expanduser()
    _check_file(file)
    arguments.overrides = [word for word in arguments.overrides if not word.startswith("to=")]
    if file.suffix != WEIGHTS:
        return _graph(arguments, file)
    prefix = given.pop("prefix", "")
    if len(given) != 1 or not given.keys() <= {"ckpt", "ckpt_path"}:
        words = " ".join(arguments.overrides) or "no checkpoint"
        expected = f"ckpt=RUN to=FILE{WEIGHTS} and maybe prefix=PREFIX"
        raise UsageError(f"export to a {WEIGHTS} file got {words}, expected {expected}: it only copies the weights.")
    return _weights(find(Path(*given.values()).expanduser()), file, prefix)


def _check_file(file: Path) -> None:
    """Raise a UsageError if the suffix of ``file`` is unknown, it exists, or a package is missing."""
    if file.suffix not in (WEIGHTS, *GRAPHS):
        expected = f"to=FILE with a name that ends in {', '.join(GRAPHS)} or {WEIGHTS}, such as to=model.pt2"
        raise UsageError(f"export got {file if file.name else 'no file to write'}, expected {expected}.")
    check_new(file)
    if file.suffix in _EXTRAS and (problem := packages.missing(_EXTRAS[file.suffix])):
        raise UsageError(f"export needs {problem}")


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


def convert(arguments: Arguments) -> int:
    """Run ``trainer consolidate FOLDER FILE`` or ``trainer shard FILE FOLDER``."""
    command, to_file = arguments.command, arguments.command == "consolidate"
    if len(arguments.words) < 2:
        expected = "a sharded checkpoint and the file" if to_file else "a checkpoint and the folder"
        usage = command_line(command, "--help")
        raise UsageError(f"{command} got {len(arguments.words)} of two paths, expected {expected} to write: `{usage}`")
    source, target = (Path(word).expanduser() for word in arguments.words)
    if to_file and not is_checkpoint_folder(source):
        raise UsageError(f"consolidate got {source}, expected a sharded checkpoint, a folder with a {MANIFEST}.")
    if not (to_file or source.is_file()):
        raise UsageError(f"shard got {source}, which is a folder or missing, expected a checkpoint that is one file.")
    check_new(target)

    def write() -> str:
        from trainer.checkpoint.conversion import consolidate, split

        left_out = (consolidate if to_file else split)(source, target)
        reason = "objects are not constructed when a checkpoint is read"
        return f" Left out, because {reason}: {', '.join(left_out)}." if left_out else ""

    return run_conversion(write, target)


def check_new(path: Path) -> None:
    """Check that ``path`` does not exist and can be created.

    Raises:
        UsageError: if it exists, or its folder is a file.
    """
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists already. Choose another name, or remove it first.")
    if path.parent.is_file():
        raise UsageError(f"{path} cannot be written: {path.parent} is a file, expected a folder.")


def run_conversion(write: Callable[[], str], target: Path) -> int:
    """Run a conversion, print the name and the size of its result, and the time, and return the exit status 0.

    Args:
        write: writes ``target`` and returns a remark to print.
        target: the file or folder that ``write`` writes.

    Raises:
        UsageError: if the input is damaged or not a checkpoint.
        CheckpointWriteError: if ``target`` cannot be written.
    """
    from trainer.cli import failure

    started = time.monotonic()
    try:
        remark = write()
    except CheckpointWriteError:
        raise
    except CheckpointError as error:
        raise UsageError(failure.one_line(error)) from error
    files = [target] if target.is_file() else [file for file in target.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files) / 2**20
    print(f"Wrote {target}: {size:,.1f} MiB in {time.monotonic() - started:.1f} s.{remark}")
    return 0
