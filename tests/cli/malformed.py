"""Malformed command lines and configs, with a part of each error: status 2, before data is loaded.

`PROJECT` is written into the working directory first. `CASES` has names, command lines and expected texts: those of
`EARLY` are refused before torch is imported, those of `LATE` before the objects are built.
"""

from __future__ import annotations

from tests.cli.conftest import FILES

PROJECT = {
    **FILES,
    "typed.py": '''
        from typing import Literal

        import line_fit
        import torch


        class Typed(line_fit.Line):
            """Arguments with annotations."""

            def __init__(self, optimizer, width: int, rate: float = 0.1, kind: Literal["a", "b"] = "a", on: bool = True,
                         name: str | None = None, sizes: list[int] | None = None):
                super().__init__(optimizer)


        class NoModule:
            pass


        class Data(line_fit.Points):
            def prepare_data(self):
                raise AssertionError("data was loaded")

            setup = train_dataloader = prepare_data
    ''',
    "conf/data/untouched.yaml": "_target_: typed.Data\nbatch_size: 4\n",
    "conf/data/bare.yaml": "_target_: typed.Data\n",
    "conf/model/typed.yaml": "_target_: typed.Typed\noptimizer: ${optimizer}\nwidth: 4\n",
    "conf/recipe/it.yaml": "# @package _global_\ndefaults: [line, override /data: untouched]\n",
    "conf/recipe/typed.yaml": "# @package _global_\ndefaults: [it, override /model: typed]\n",
    "conf/recipe/tab.yaml": "# @package _global_\nmodel:\n\tstart: 1\n",
    "conf/recipe/indented.yaml": "# @package _global_\nmodel:\n  start: 1\n stop: 2\n",
    "conf/recipe/twice.yaml": "# @package _global_\nseed: 1\nseed: 2\n",
    "conf/recipe/no_target.yaml": "# @package _global_\nmodel:\n  start: 1\n",
    "conf/recipe/list.yaml": "# @package _global_\ntrainer: [1, 2]\n",
    "conf/recipe/unclosed.yaml": "# @package _global_\nmodel: {start: 1\n",
    "conf/recipe/tagged.yaml": "# @package _global_\nmodel: !!python/object/apply:os.getcwd []\n",
    "conf/recipe/circle.yaml": (
        "# @package _global_\ndefaults: [it]\nmodel: {start: '${model.fail_at}', fail_at: '${model.start}'}\n"
    ),
}
"""Files by name."""

IT = ["fit", "+recipe=it"]
TYPED = ["fit", "+recipe=typed"]

EARLY: list[tuple[str, list[str], str]] = [
    (
        "epochs below -1",
        [*IT, "trainer.max_epochs=-5"],
        "trainer.max_epochs is -5, expected at least 0, or -1 for no end",
    ),
    ("half a step", [*IT, "trainer.max_steps=0.5"], "trainer.max_steps is 0.5, expected a whole number"),
    ("steps below -1", [*IT, "trainer.max_steps=-2"], "trainer.max_steps is -2, expected at least 0, or -1"),
    ("a limit below 0", [*IT, "trainer.limit_train_batches=-1"], "limit_train_batches is -1, expected at least 0"),
    (
        "a share above 1",
        [*IT, "trainer.limit_val_batches=1.5"],
        "is 1.5, expected a share of the batches, of at most 1.0",
    ),
    ("validating rarely", [*IT, "trainer.val_check_interval=2.0"], "or a whole number of them, such as 2."),
    ("validating never", [*IT, "trainer.val_check_interval=0"], "is 0, expected more than 0. To do without validation"),
    ("no window", [*IT, "trainer.accumulate_grad_batches=0"], "accumulate_grad_batches is 0, expected at least 1."),
    ("half a window", [*IT, "trainer.accumulate_grad_batches=1.5"], "is 1.5, expected a whole number or null."),
    (
        "more than all",
        [*IT, "trainer.min_epochs=9"],
        "trainer.min_epochs is 9, expected at most trainer.max_epochs, which is 2.",
    ),
    ("clipping below 0", [*IT, "trainer.gradient_clip_val=-1"], "gradient_clip_val is -1, expected at least 0."),
    ("no epochs between", [*IT, "trainer.check_val_every_n_epoch=0"], "is 0, expected at least 1, or null to count"),
    ("no device", [*IT, "trainer.devices=0"], "trainer.devices is 0, expected a number of devices of at least 1"),
    ("a device twice", [*IT, "trainer.devices=[0,0]"], "trainer.devices is [0, 0], expected a number of devices"),
    ("all GPUs of a CPU", [*IT, "trainer.devices=-1"], "trainer.devices is -1 (all GPUs) and trainer.acc"),
    ("an unknown device", [*IT, "trainer.accelerator=cuda:0"], "trainer.accelerator is cuda:0, expected"),
    ("words for a number", [*IT, "optimizer.lr=abc"], "optimizer.lr is abc, expected a number (default: 0.1)."),
    ("no batch", [*IT, "data.batch_size=0"], "data.batch_size is 0, expected a whole number of at least 1."),
    (
        "workers below 0",
        [*IT, "++data.num_workers=-1"],
        "data.num_workers is -1, expected a whole number of at least 0.",
    ),
    ("a seed below 0", [*IT, "seed=-1"], "seed is -1, expected a whole number from 0 to 4294967295 or null"),
    ("half a seed", [*IT, "seed=0.5"], "seed is 0.5, expected a whole number"),
    ("resuming how", [*IT, "resume=yes"], "resume is yes, expected auto or null."),
    ("a tab", ["fit", "+recipe=tab"], "A config file is not valid YAML"),
    ("wrong indentation", ["fit", "+recipe=indented"], "A config file is not valid YAML"),
    ("a key twice", ["fit", "+recipe=twice"], "found duplicate key seed"),
    ("an open brace", ["fit", "+recipe=unclosed"], "A config file is not valid YAML"),
    ("a python object", ["fit", "+recipe=tagged"], "could not determine a constructor for the tag"),
    ("a circle", ["fit", "+recipe=circle"], "model.start: Recursive interpolation detected."),
    ("a list for a node", ["fit", "+recipe=list"], "In 'recipe/list'"),
    ("a model without a class", ["fit", "+recipe=no_target"], "model is {'start': 1}, expected a node with a _target_"),
    ("an unknown setting", [*IT, "trainer.max_epoch=3"], "Did you mean 'trainer.max_epochs'?"),
    ("an unknown recipe", ["fit", "+recipe=typd"], "Config group 'recipe' has no option 'typd'. Did you mean 'typed'?"),
    ("an unknown precision", [*IT, "precision=fp61"], "Did you mean 'fp"),
    ("an unknown command", ["fti", "+recipe=it"], "There is no command 'fti'. Did you mean 'fit'?"),
    ("an unknown flag", [*IT, "--mutlirun"], "There is no flag '--mutlirun'. Did you mean '--multirun'?"),
    ("a schedule for nobody", [*IT, "scheduler=cosine"], "scheduler=cosine has no effect"),
    (
        "a setting for nobody",
        [*IT, "scheduler=cosine", "scheduler.eta_min=1"],
        "scheduler.eta_min=1 has no effect",
    ),
    ("no checkpoint", [*IT, "ckpt_path=nowhere.ckpt"], "ckpt_path is nowhere.ckpt: there is no such file."),
    ("no weights", [*IT, "weights=nowhere.pt"], "weights is nowhere.pt: there is no such file or folder."),
    ("a number for weights", [*IT, "weights=3"], "weights is 3, expected the folder of a run, a checkpoint, a state"),
    ("no text for weights", [*IT, "weights=' '"], "weights is ' ', expected the folder of a run"),
    ("a folder without weights", [*IT, "weights=conf"], "weights is conf, a folder without checkpoints."),
    ("weights that are elsewhere", [*IT, "weights=https://a.b/c.pt"], "expected a file or folder of this machine."),
    ("two beginnings", [*IT, "weights=typed.py", "ckpt_path=typed.py"], "Got weights=typed.py and ckpt_path=typed.py"),
    ("weights to test", ["test", "+recipe=it", "weights=typed.py"], "with test, expected a command that trains"),
    (
        "weights alone",
        ["fit", "weights=typed.py"],
        "weights=typed.py loads only weights, not the config. Choose a recipe",
    ),
    ("a number for a path", [*IT, "ckpt_path=3"], "ckpt_path is 3, expected the path or URL of a file"),
    ("no time", [*IT, "trainer.max_time=5"], "trainer.max_time is 5, expected a time such as 00:12:00:00"),
    (
        "no list",
        [*IT, "precision=16", "precision.fp32_modules=head"],
        "precision.fp32_modules is head, expected a list",
    ),
    ("a node for a number", [*IT, "trainer.max_epochs={a: 1}"], "expected a whole number or null"),
    ("a rate that is no number", [*IT, "optimizer.lr=nan"], "optimizer.lr is nan, expected a finite number."),
    ("a rate without end", [*IT, "optimizer.lr=inf"], "optimizer.lr is inf, expected a finite number."),
    ("momentum that is no number", [*IT, "optimizer.momentum=nan"], "optimizer.momentum is nan, expected a finite"),
    ("a rate below 0", [*IT, "optimizer.lr=-1"], "optimizer.lr is -1, expected at least 0."),
    ("momentum below 0", [*IT, "optimizer.momentum=-0.5"], "optimizer.momentum is -0.5, expected at least 0."),
    (
        "a rate from the environment",
        [*IT, "optimizer.lr=${oc.env:NO_RATE,'0.01'}"],
        "optimizer.lr is 0.01, expected a finite number. Environment variables are text.",
    ),
    (
        "no rate from the environment",
        [*IT, "optimizer.lr=${oc.env:NO_RATE,fast}"],
        "optimizer.lr is fast, expected a finite number.",
    ),
    (
        "nothing from the environment",
        [*IT, "optimizer.lr=${oc.env:NO_RATE}"],
        "optimizer.lr requires the environment variable NO_RATE, which is not set. Set it, or give a default:"
        " ${oc.env:NO_RATE,VALUE}.",
    ),
    (
        "a batch from the environment",
        [*IT, "data.batch_size=${oc.env:NO_SIZE,'4'}"],
        "data.batch_size is 4, expected a whole number of at least 1. Environment variables are text.",
    ),
    (
        "an argument that the config lacks",
        [*IT, "data=bare", "data.batch_size=0"],
        "There is no setting 'data.batch_size'. To add a new setting, write +data.batch_size=0.",
    ),
    (
        "an argument that the config lacks, in a node with a long one",
        [*IT, "model.depth=3"],
        "There is no setting 'model.depth'. To add a new setting, write +model.depth=3.",
    ),
    (
        "a batch without end",
        [*IT, "data.batch_size=inf"],
        "data.batch_size is inf, expected a whole number of at least",
    ),
    ("half a sample", [*IT, "data.batch_size=1.5"], "data.batch_size is 1.5, expected a whole number of at least 1."),
    ("half a worker", [*IT, "++data.num_workers=0.5"], "data.num_workers is 0.5, expected a whole number of at least"),
    (
        "time that runs back",
        [*IT, "trainer.max_time={hours: -1}"],
        "{'hours': -1}, expected a time such as 00:12:00:00",
    ),
    ("time in unknown units", [*IT, "trainer.max_time={hour: 1}"], "or null. Did you mean 'hours'?"),
    ("validating all the time", [*IT, "trainer.val_check_interval={hours: 0}"], "{'hours': 0}, expected more than 0."),
    ("and in one word", [*IT, "trainer.val_check_interval='00:00:00:00'"], "is 00:00:00:00, expected more than 0."),
    (
        "more than 64 bits",
        [*IT, f"trainer.devices={10**22}"],
        f"trainer.devices is {10**22}, expected a number that fits",
    ),
    (
        "patience that is no number",
        [*IT, "trainer.dataloader_timeout=nan"],
        "dataloader_timeout is nan, expected at least",
    ),
    ("a share that is no number", [*IT, "trainer.limit_train_batches=nan"], "limit_train_batches is nan, expected"),
    ("an empty strategy", [*IT, "trainer.strategy=''"], "trainer.strategy is empty, expected auto, ddp"),
    ("an empty path", [*IT, "ckpt_path=' '"], "ckpt_path is ' ', expected the path or URL of a file"),
    ("a folder for a file", [*IT, "ckpt_path=conf"], "ckpt_path is conf, which is a folder, expected a checkpoint."),
    ("a word for a switch", [*IT, "exact_resume=maybe"], "exact_resume is maybe, expected true or false"),
    ("null for a switch", [*IT, "exact_resume=null"], "exact_resume is null, expected true or false."),
    ("a seed of 33 bits", [*IT, "seed=4294967296"], "seed is 4294967296, expected a whole number from 0 to 4294967295"),
    ("a seed that is a switch", [*IT, "seed=true"], "seed is true, expected a number (default: 42)."),
    ("a number for a callback", [*IT, "+callbacks.x=5"], "callbacks.x is 5, expected a node with a _target_, or null."),
    ("a list for a logger", [*IT, "+logger.x=[1]"], "logger.x is [1], expected a node with a _target_, or null."),
    ("a list for callbacks", [*IT, "callbacks=[]"], "There is no callbacks in the config, expected one"),
    ("no checks left", [*IT, "~checks"], "There is no checks in the config"),
    ("no callbacks left", [*IT, "~callbacks"], "it cannot be removed. To use none, write callbacks=none."),
    ("no precision left", [*IT, "~precision"], "There is no precision in the config, expected one"),
    ("no seed left", [*IT, "~seed"], "There is no seed in the config, expected one"),
    ("no epochs left", [*IT, "~trainer.max_epochs"], "trainer.max_epochs cannot be removed."),
    ("null for a scheduler", [*IT, "scheduler=null"], "expected one of: cosine, none, onecycle"),
    (
        "null for a precision",
        [*IT, "precision=null"],
        "precision is null, expected one of: 16-mixed, 16-true, 32-true",
    ),
    ("two precisions at once", [*IT, "precision=[16,32]"], "To run each of them, use -m precision=16-mixed,32-true"),
    ("no key", [*IT, "=3"], "Got '=3', expected a setting, key=value."),
    ("no folder", [*IT, "hydra.run.dir="], "hydra.run.dir is empty, expected a folder for the run"),
    ("no mode of Hydra's", [*IT, "hydra.mode=RUNN"], "Invalid value 'RUNN', expected one of [RUN, MULTIRUN].\n"),
    (
        "a sweep of nothing",
        ["-m", *IT, "optimizer.lr=range(1,0)"],
        "optimizer.lr=range(1,0) has no values",
    ),
    ("a wrong one at the end", ["-m", *IT, "seed=1,2,-1"], "seed is -1, expected a whole number from 0"),
    (
        "one that does not go with another",
        ["-m", *IT, "trainer.max_epochs=5,1", "trainer.min_epochs=3"],
        "trainer.min_epochs is 3, expected at most trainer.max_epochs, which is 1.",
    ),
]

LATE: list[tuple[str, list[str], str]] = [
    ("no last checkpoint", [*IT, "data=points", "ckpt_path=last"], "ckpt_path is last"),
    ("an argument too few", [*TYPED, "~model.width"], "model: typed.Typed: missing a required argument: 'width'."),
    ("an argument too many", [*TYPED, "+model.widht=1"], "typed.Typed has no argument 'widht'. Did you mean 'width'?"),
    ("text for a number", [*TYPED, "model.width=wide"], "model.width is wide, expected a number"),
    ("half for a whole", [*TYPED, "model.width=1.5"], "model.width is 1.5, expected a whole number."),
    ("text for a rate", [*TYPED, "+model.rate=fast"], "model.rate is fast, expected a number."),
    ("none of the words", [*TYPED, "+model.kind=c"], "model.kind is c, expected a or b."),
    ("a number for a switch", [*TYPED, "+model.on=3"], "model.on is 3, expected true or false."),
    ("a number for a name", [*TYPED, "+model.name=3"], "model.name is 3, expected text or null."),
    ("a number for a list", [*TYPED, "+model.sizes=3"], "model.sizes is 3, expected a list or null."),
    (
        "no module",
        [*TYPED, "model={_target_: typed.NoModule}", "~model.optimizer", "~model.width"],
        "a LightningModule",
    ),
    ("a class that is not there", [*IT, "model._target_=line_fit.Lien"], "has no 'Lien'. Did you mean 'Line'?"),
    (
        "arguments of another optimizer",
        [*IT, "optimizer=adamw", "optimizer._target_=torch.optim.SGD"],
        "torch.optim.SGD has no arguments 'betas', 'eps'.",
    ),
    (
        "arguments of another optimizer, to be left out",
        [*IT, "optimizer=adamw", "optimizer._target_=torch.optim.SGD"],
        "To remove them: ~optimizer.betas ~optimizer.eps",
    ),
    (
        "arguments of another optimizer, one of which looks like one of its own",
        [*IT, "optimizer=adamw", "optimizer._target_=torch.optim.Rprop"],
        "Did you mean 'etas' for 'betas'?",
    ),
    (
        "arguments of another optimizer, all at once",
        [*IT, "optimizer=adamw", "optimizer._target_=torch.optim.Rprop"],
        "To remove them: ~optimizer.betas ~optimizer.eps ~optimizer.weight_decay",
    ),
    (
        "an argument of another optimizer",
        [*IT, "optimizer=adamw", "optimizer._target_=torch.optim.Muon"],
        "To remove it: ~optimizer.betas",
    ),
    (
        "a number from the environment",
        [*TYPED, "model.width=${oc.env:NO_WIDTH,'4'}"],
        "expected a whole number. Environment variables are text. To convert one to a number, use ${oc.decode:",
    ),
    ("an unknown argument of SGD", [*IT, "+optimizer.momentun=1"], "no argument 'momentun'. Did you mean 'momentum'?"),
    (
        "a mode nobody knows",
        [*IT, "callbacks=early_stopping", "callbacks.early_stopping.mode=up"],
        "rejects its arguments",
    ),
    (
        "no monitor",
        [*IT, "callbacks.model_checkpoint.save_top_k=3", "callbacks.model_checkpoint.monitor=null"],
        "BestCheckpoint rejects its arguments",
    ),
    ("no GPU", [*IT, "trainer.accelerator=tpu"], "need a package that is not installed"),
    ("a scale below 0", [*IT, "precision=16", "precision.init_scale=-1"], "init_scale"),
    ("anomalies, barebones", [*IT, "trainer.barebones=true", "trainer.detect_anomaly=true"], "detect_anomaly"),
    (
        "two ways to clip",
        [
            *IT,
            "trainer.gradient_clip_val=1",
            "+callbacks.c._target_=trainer.callbacks.GradientClipping",
            "+callbacks.c.max_norm=1",
        ],
        "gradient_clip_val",
    ),
    ("null for a rate", [*IT, "optimizer.lr=null"], "torch.optim.SGD rejects its arguments, lr=null among them: "),
    ("growing by less than all", [*IT, "precision=16", "precision.growth_factor=0.5"], "growth_factor=0.5, expected a"),
    ("a scale that is no number", [*IT, "precision=16", "precision.init_scale=nan"], "Got init_scale=nan, expected"),
    ("arguments that are no list", [*IT, "+model._args_=3"], "model._args_ is 3, expected a list."),
    ("a module for a class", [*IT, "model._target_=line_fit"], "line_fit is a module, expected a class or a function."),
    ("_partial_ of text", [*IT, "optimizer._partial_=maybe"], "_partial_ is maybe, expected true or false"),
]

CASES = [*EARLY, *LATE]
