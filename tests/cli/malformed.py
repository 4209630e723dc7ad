"""Malformed command lines and configs, with a part of each error: status 2, before data is loaded.

`PROJECT` is written into the working directory first. `CASES` has command lines and expected texts: those of `EARLY`
are refused before torch is imported, those of `LATE` before the objects are built.
"""

import shlex

from tests.cli.conftest import FILES

PROJECT = {
    **FILES,
    "typed.py": '''
        import line_fit
        import torch


        class Typed(line_fit.Line):
            """Arguments with annotations."""

            def __init__(self, optimizer, width: int, rate: float = 0.1, on: bool = True):
                super().__init__(optimizer)


        class NoModule:
            pass


        class Data(line_fit.Points):
            def prepare_data(self):
                raise AssertionError("data was loaded")

            setup = train_dataloader = prepare_data
    ''',
    "conf/data/untouched.yaml": "_target_: typed.Data\nbatch_size: 4\n",
    "conf/model/typed.yaml": "_target_: typed.Typed\noptimizer: ${optimizer}\nwidth: 4\n",
    "conf/recipe/it.yaml": "# @package _global_\ndefaults: [line, override /data: untouched]\n",
    "conf/recipe/typed.yaml": "# @package _global_\ndefaults: [it, override /model: typed]\n",
    "conf/recipe/tab.yaml": "# @package _global_\nmodel:\n\tstart: 1\n",
    "conf/recipe/no_target.yaml": "# @package _global_\nmodel:\n  start: 1\n",
    "conf/recipe/list.yaml": "# @package _global_\ntrainer: [1, 2]\n",
    "conf/recipe/tagged.yaml": "# @package _global_\nmodel: !!python/object/apply:os.getcwd []\n",
    "conf/recipe/circle.yaml": (
        "# @package _global_\ndefaults: [it]\nmodel: {start: '${model.fail_at}', fail_at: '${model.start}'}\n"
    ),
}
"""Files by name."""

IT = "fit +recipe=it "

_EARLY = {
    # the Trainer's arguments
    IT + "'trainer.max_time={hour: 1}'": "or null. Did you mean 'hours'?",
    IT + "\"trainer.strategy=''\"": "trainer.strategy is empty, expected auto, ddp",
    # values at the top of the config
    IT + "seed=-1": "seed is -1, expected at least 0.",
    "test +recipe=it resume=auto": "Got resume=auto with test, expected fit or compare",
    IT + "exact_resume=null": "exact_resume is null, expected true or false.",
    IT + "\"ckpt_path=' '\"": "ckpt_path is ' ', expected the path or URL of a file",
    IT + "ckpt_path=conf": "ckpt_path is conf, which is a folder, expected a checkpoint.",
    IT + "ckpt_path=nowhere.ckpt": "ckpt_path is nowhere.ckpt: there is no such file or folder. Expected a checkpoint.",
    IT + "weights=nowhere.pt": "weights is nowhere.pt: there is no such file or folder.",
    IT + "weights=https://a.b/c.pt": "expected a file or folder of this machine.",
    IT + "weights=typed.py ckpt_path=typed.py": "Got weights=typed.py and ckpt_path=typed.py",
    # data, optimizer and scheduler
    IT + "precision=32 precision.fp32_modules=[head]": "There is no setting 'precision.fp32_modules'.",
    IT + "scheduler=cosine scheduler.eta_min=1": "scheduler.eta_min=1 has no effect",
    # the environment
    IT + "optimizer.lr='${oc.env:NO_RATE}'": "give a default: ${oc.env:NO_RATE,VALUE}",
    # files
    "fit +recipe=tab": "A config file is not valid YAML",
    "fit +recipe=tagged": "could not determine a constructor for the tag",
    "fit +recipe=circle": "model.start: Recursive interpolation detected.",
    "fit +recipe=list": "In 'recipe/list'",
    "fit +recipe=no_target": "model is {'start': 1}, expected a node with a _target_",
    # nodes
    IT + "+callbacks.x=5": "callbacks.x is 5, expected a node with a _target_, the dotted name of a class, or null.",
    IT + "~precision": "There is no precision in the config, expected one",
    # Hydra
    IT + "=3": "Got '=3', expected a setting, key=value.",
    IT + "hydra.run.dir=": "hydra.run.dir is empty, expected a folder for the run",
    IT + "hydra.job.chdir=true": "hydra.job.chdir is true, expected false",
    IT + "hydra.job.name=a/b": "hydra.job.name is a/b, expected a name without slashes",
    # sweeps
    IT + "-m 'optimizer.lr=range(1,0)'": "optimizer.lr=range(1,0) has no values",
    IT + "-m trainer.max_epochs=5,ten": "trainer.max_epochs is ten, expected a whole number",
}

TYPED = "fit +recipe=typed "
CLIPPING = "+callbacks.c._target_=trainer.callbacks.GradientClipping +callbacks.c.max_norm=1"

_LATE = {
    # signatures
    TYPED + "~model.width": "rate, on. Set it: +model.width=VALUE",
    TYPED + "+model.widht=1": "typed.Typed has no argument 'widht'. Did you mean 'width'?",
    IT + "optimizer=adamw optimizer._target_=torch.optim.Rprop": "~optimizer.betas ~optimizer.eps",
    IT + "optimizer=adam +optimizer.nesterov=true": "~optimizer.nesterov",
    # annotations
    TYPED + "\"model.width=${oc.env:NO_WIDTH,'4'}\"": "expected a whole number. Environment variables are text.",
    TYPED + "+model.on=ture": "model.on is ture, expected true or false. Did you mean 'true'?",
    # targets
    TYPED + "'model={_target_: typed.NoModule}' ~model.optimizer ~model.width": "a LightningModule",
    IT + "+model._args_=3": "model._args_ is 3, expected a list.",
    IT + "optimizer._partial_=maybe": "_partial_ is maybe, expected true or false",
    # constructors
    IT + "optimizer.lr=abc": "torch.optim.SGD rejects its arguments: '<' not supported",
    IT + "'optimizer.lr=[1,2]'": "torch.optim.SGD rejects its arguments: '<' not supported",
    IT + "optimizer.lr=-1": "torch.optim.SGD rejects its arguments: Invalid learning rate: -1.",
    IT + "\"optimizer.lr=${oc.env:NO_RATE,'0.01'}\"": "use ${oc.decode:${oc.env:NAME}}",
    IT + "precision=16 precision.growth_factor=0.5": "growth_factor=0.5, expected a",
    IT + "trainer.devices=-1": "`devices` selected with `CPUAccelerator` should be",
    IT + "trainer.accelerator=tpu": "need a package that is not installed",
    IT + "trainer.barebones=true trainer.detect_anomaly=true": "detect_anomaly",
    IT + f"trainer.gradient_clip_val=1 {CLIPPING}": "gradient_clip_val",
    IT + "data=points ckpt_path=last": "ckpt_path is last",
}

EARLY = [(shlex.split(words), expected) for words, expected in _EARLY.items()]
LATE = [(shlex.split(words), expected) for words, expected in _LATE.items()]
CASES = [*EARLY, *LATE]
