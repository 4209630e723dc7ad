"""Malicious files and configs, each of which would write a file if its code ran."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Payload:
    """Write the file ``owned`` when unpickled."""

    def __init__(self, owned: Path) -> None:
        self.owned = owned

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.owned}'",)


def bare_pickle(good: Path, bad: Path, owned: Path) -> None:
    """Write the old format of ``torch.save``, a pickle without an archive."""
    bad.write_bytes(pickle.dumps(Payload(owned)))


def poisoned_archive(good: Path, bad: Path, owned: Path, entry: str = "data.pkl") -> None:
    """Write a good checkpoint with one of its pickles replaced by the payload."""
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w", zipfile.ZIP_STORED) as target:
        target.comment = source.comment
        for item in source.infolist():
            contents = source.read(item)
            target.writestr(item, pickle.dumps(Payload(owned)) if item.filename.endswith(entry) else contents)


class Object(Payload):
    """Use ``exec``, which torch does not forbid by name: among the hyperparameters, such an object is skipped."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.owned)!r}, 'w')",)


def _with_key(*path: str, kind: type[Payload] = Payload) -> Callable[[Path, Path, Path], None]:
    """Write a good checkpoint again with ``torch.save``, with the payload at one of its keys."""

    def write(good: Path, bad: Path, owned: Path) -> None:
        import torch

        checkpoint = torch.load(good, weights_only=True)
        place = checkpoint
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = kind(owned)
        torch.save(checkpoint, bad)

    return write


def poisoned_directory(good: Path, bad: Path, owned: Path) -> None:
    """Write a folder in the format of torch's distributed checkpoints."""
    bad.mkdir()
    (bad / ".metadata").write_bytes(pickle.dumps(Payload(owned)))
    (bad / "meta.pt").write_bytes(pickle.dumps(Payload(owned)))


def poisoned_legacy(good: Path, bad: Path, owned: Path) -> None:
    """Write the oldest format of ``torch.save``, a tar archive."""
    import io
    import tarfile

    with tarfile.open(bad, "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            contents = pickle.dumps(Payload(owned))
            item = tarfile.TarInfo(name)
            item.size = len(contents)
            archive.addfile(item, io.BytesIO(contents))


CHECKPOINTS: dict[str, Callable[[Path, Path, Path], None]] = {
    "a bare pickle": bare_pickle,
    "an archive with another pickle": poisoned_archive,
    "an old archive": poisoned_legacy,
    "a distributed checkpoint": poisoned_directory,
    "hyper-parameters": _with_key("hyper_parameters", "payload"),
    "a callback's state": _with_key("callbacks", "payload"),
    "an optimizer's state": _with_key("optimizer_states"),
    "random states": _with_key("loops", "amp_trainer", "ranks"),
    "a dataloader's state": _with_key("loops", "fit_loop", "state_dict", "combined_loader"),
    "the scaler's state": _with_key("MixedPrecision"),
}
"""Each writes a malicious checkpoint from a good one: (good, bad, owned)."""

PASSED_OVER = {"an object among the hyper-parameters": _with_key("hyper_parameters", "payload", kind=Object)}
"""Like ``CHECKPOINTS``, but these are read, without the malicious part, and not refused."""


TARGETS: dict[str, dict[str, str]] = {
    "os.system": {"command": "touch {owned}"},
    "torch.os.system": {"command": "touch {owned}"},
    "subprocess.Popen": {"args": "[touch, '{owned}']"},
    "builtins.exec": {"_args_": "[\"open('{owned}', 'w')\"]"},
    "builtins.eval": {"_args_": "[\"open('{owned}', 'w')\"]"},
    "torch.load": {"f": "{pickle}", "weights_only": "false"},
    "torch.serialization.load": {"f": "{pickle}", "weights_only": "false"},
    "numpy.load": {"file": "{pickle}", "allow_pickle": "true"},
    "pickle.load": {"_args_": "['{pickle}']"},
    "pathlib.Path.touch": {"_args_": "['{owned}']"},
    "torch.hub.load": {"repo_or_dir": "{folder}", "model": "payload", "source": "local"},
    "torch.jit.load": {"f": "{pickle}"},
    "torch.package.PackageImporter": {"file_or_buffer": "{pickle}"},
    "torch.utils.cpp_extension.load": {"name": "payload", "sources": "['{pickle}']"},
    "torch.distributed.run.main": {"args": "[touch, '{owned}']"},
    "lightning.pytorch.LightningModule.load_from_checkpoint": {"checkpoint_path": "{pickle}", "weights_only": "false"},
    "lightning.fabric.utilities.cloud_io._load": {"path_or_url": "{pickle}", "weights_only": "false"},
    "lightning.pytorch.cli.LightningCLI": {"args": "['{pickle}']"},
    "hydra.utils.instantiate": {"config": "{{_target_: os.system, command: touch {owned}}}"},
    "functools.partial": {"_args_": "['{owned}']"},
    "trainer.cli.build.build": {"node": "{{_target_: os.system, command: touch {owned}}}"},
    "torch.storage._load_from_bytes": {"b": "{pickle}"},
    "torch.utils.data.dataloader.os.system": {"command": "touch {owned}"},
    "torch.multiprocessing.Process": {"_args_": "[1]"},
    "joblib.load": {"filename": "{pickle}"},
    "joblib.numpy_pickle.os.system": {"command": "touch {owned}"},
    "sklearn.externals.joblib.load": {"filename": "{pickle}"},
}
"""Targets that the config of a checkpoint may not name, with their arguments."""


def write_run(target: str, folder: Path, owned: Path) -> Path:
    """Write the folder of a run, with ``target`` as a callback in its config, and return it."""
    poison = folder / "payload.pkl"
    bare_pickle(folder, poison, owned)
    (folder / "hubconf.py").write_text(f"open({str(owned)!r}, 'w')\n")
    arguments = [
        f"{name}: " + value.format(owned=owned, pickle=poison, folder=folder) for name, value in TARGETS[target].items()
    ]
    run = folder / "given"
    (run / ".hydra").mkdir(parents=True)
    (run / "last.ckpt").touch()
    (run / ".hydra/config.yaml").write_text(CONFIG.format(folder=folder, target=target, arguments=", ".join(arguments)))
    return run


CONFIG = """
precision: {{_target_: trainer.precision.FullPrecision}}
trainer: {{_target_: trainer.Trainer, accelerator: cpu, devices: 1, max_epochs: 1}}
callbacks: {{stranger: {{_target_: {target}, {arguments}}}}}
logger: {{}}
data: {{_target_: faulty.Data}}
model: {{_target_: faulty.Net, folder: {folder}}}
optimizer: null
scheduler: null
"""


def copy_of(folder: Path, where: Path) -> Path:
    """Copy a run's folder, to damage the copy."""
    shutil.copytree(folder, where, dirs_exist_ok=True)
    return where
