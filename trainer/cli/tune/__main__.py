"""``python -m trainer.cli.tune FOLDER``: an attempt of ``tune`` in its own process (`trainer.cli.tune.child`)."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.cli.tune.child import main

if __name__ == "__main__":
    main(Path(sys.argv[1]))
