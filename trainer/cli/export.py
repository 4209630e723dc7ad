"""``trainer export``: a trained module for use without us: as a graph, or its weights. Imports torch when it begins.

With ``ckpt=RUN to=FILE`` what is written depends on how the name of FILE ends: the graph of the module's ``forward``
(`trainer.cli.graphs`), or the weights. With two words, a checkpoint and a file of safetensors, it is the weights, and
no config is needed.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from trainer import packages
from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.consolidate import absent, carry_out, existing, two
from trainer.errors import TrainerError
from trainer.record.checkpoints import find, is_checkpoint_folder

WEIGHTS = ".safetensors"
GRAPHS = (".onnx", ".pt2")
"""Endings of the names of files with graphs."""
_NEEDS = {WEIGHTS: ("safetensors",), ".onnx": ("export", "onnx", "onnxscript")}  # the extra, and modules of it


def command(arguments: Arguments) -> int:
    """``trainer export ckpt=RUN to=FILE [SETTING=VALUE]``, or ``trainer export CHECKPOINT FILE.safetensors [PREFIX]``.

    Returns:
        0, or 1 where it cannot be exported, or what was written computes something else.
    """
    if arguments.overrides:
        return _of_run(arguments)
    checkpoint, file = two(arguments, f"a checkpoint, and the {WEIGHTS} file to make of its weights")
    if existing(checkpoint, "export").is_dir() and not is_checkpoint_folder(checkpoint):
        raise UsageError(
            f"export got {checkpoint}, which is a folder and no checkpoint: name one of those in it; or, for a run's"
            f" best one: python -m trainer export ckpt={checkpoint} to={file}"
        )
    if file.suffix in GRAPHS:
        raise UsageError(
            f"export got {file}, for which the config of the run is needed: python -m trainer export ckpt={checkpoint}"
            f" to={file}"
        )
    _check_file(file, "export got")
    return _weights(checkpoint, file, arguments.words[2] if len(arguments.words) > 2 else "")


def _check_file(file: Path, got: str) -> None:
    """Refuse a file that cannot be written.

    Raises:
        UsageError: of another kind, one that is there, or a package is missing.
    """
    if file.suffix not in (WEIGHTS, *GRAPHS):
        kinds = f"a {WEIGHTS} file" if got == "export got" else f"one that ends in {', '.join(GRAPHS)} or {WEIGHTS}"
        raise UsageError(f"{got} {file}, expected the name of {kinds}, such as model{file.suffix and WEIGHTS}.")
    absent(file)
    if file.suffix in _NEEDS and (problem := packages.missing(*_NEEDS[file.suffix])):
        raise UsageError(f"export needs {problem}")


def _weights(checkpoint: Path, file: Path, prefix: str = "") -> int:
    def convert() -> str:
        from trainer.checkpoint.conversion import export, weights_of

        weights = weights_of(checkpoint, prefix)
        export(weights, file)
        return f" {len(weights)} tensors."

    return carry_out(convert, file)


def _of_run(arguments: Arguments) -> int:
    """With settings: of the run that ``ckpt`` names, or of a config and ``ckpt_path``."""
    from trainer.cli import failure, restore
    from trainer.cli.tune import plain
    from trainer.cli.validate import validate

    arguments.check_flags()
    if arguments.words:
        raise UsageError(f"export got the word {arguments.words[0]!r} among settings, expected ckpt=RUN to=FILE.")
    file = _target(arguments)
    if file is None:
        raise UsageError(
            f"export needs the file to write, which ends in {', '.join(GRAPHS)} or {WEIGHTS}: python -m trainer export"
            f" {' '.join(arguments.overrides)} to=model.pt2"
        )
    _check_file(file, "to is")
    if file.suffix == WEIGHTS:
        return _weights(_only_checkpoint(arguments), file)
    restore.apply(arguments)
    config = validate(arguments)
    if config.ckpt_path is None:
        raise UsageError("export needs what was trained: ckpt=RUN, its folder or a checkpoint in it.")
    from trainer.cli.graphs import export
    from trainer.cli.run import assemble

    with TemporaryDirectory() as folder:
        settings = plain(config, Path(folder))
        settings |= {
            "callbacks": {},
            "precision": {"_target_": "trainer.precision.FullPrecision"},
            "weights": None,
            "trainer": settings["trainer"] | {"accelerator": "cpu", "limit_val_batches": None},
        }
        try:
            module, data, trainer = assemble(settings, Path(folder))
            print(export(trainer, module, data, config.ckpt_path, file), flush=True)
        except UsageError:
            raise
        except TrainerError as error:
            failure.tell(error)
            return 1
    return 0


def _target(arguments: Arguments) -> Path | None:
    """The file that ``to`` names on the command line, which it is taken out of; None without one."""
    given = [word for word in arguments.overrides if word.startswith("to=")]
    arguments.overrides = [word for word in arguments.overrides if word not in given]
    return Path(given[-1].partition("=")[2].strip("'\"")).expanduser() if given else None


def _only_checkpoint(arguments: Arguments) -> Path:
    """The checkpoint, where nothing but that is of interest."""
    if len(arguments.overrides) != 1 or arguments.overrides[0].partition("=")[0] not in ("ckpt", "ckpt_path"):
        raise UsageError(
            f"export to a {WEIGHTS} file takes the weights as the checkpoint has them, and no settings: expected"
            f" ckpt=RUN to=FILE{WEIGHTS}, got {' '.join(arguments.overrides) or 'no checkpoint'}."
        )
    return find(Path(arguments.overrides[0].partition("=")[2].strip("'\"")).expanduser())
