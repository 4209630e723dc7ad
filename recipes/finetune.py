"""Fine-tuning of a Hugging Face model from a local folder: all of its weights, or LoRA adapters."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recipes.data.tokenizers import FileTokenizer
from recipes.language_model import Perplexity, Ratio, sum_of_losses
from recipes.schedules import with_schedule

Task = Literal["causal", "classification"]

_CLASSES = {"causal": "AutoModelForCausalLM", "classification": "AutoModelForSequenceClassification"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class FineTuner(L.LightningModule):
    """Fine-tunes a model of the library ``transformers``, as a language model or a classifier of texts.

    A batch is ``(tokens, targets)`` or ``(tokens, mask, targets)``, int64. ``tokens`` and ``mask`` have shape
    (batch, length); the mask is 1 for a token and 0 for padding. The targets of a language model have the same shape:
    the next token, or -100 for ignored positions. The loss is the mean over the positions that are not ignored, and
    ``training_step`` returns their number as the batch's weight. The targets of a classifier have shape (batch,), and
    the weight is the number of texts.

    It logs ``train_loss`` at every step and, over an epoch, ``val_loss`` and ``test_loss``, in nats. A language model
    also logs ``val_perplexity`` and ``test_perplexity``; a classifier logs ``val_acc`` and ``test_acc``, in [0, 1].

    At the end of a fit, the model and its tokenizer are written in Hugging Face's format (``save_pretrained``); with
    LoRA, only the adapters. Under a strategy that shards, the first process gathers the weights in its memory.

    Only the folder is read: custom code of a model is not run (``trust_remote_code`` is False),
    no pickle is opened (weights are ``.safetensors``), and nothing is downloaded.

    Args:
        optimizer: called with parameter groups and returns the optimizer; its ``weight_decay`` applies only to
            matrices, not to biases and normalization layers. Frozen parameters are not passed.
        scheduler: called with the optimizer and the number of optimizer steps of the run (see `recipes.schedules`).
            None: a constant learning rate.
        folder: folder of the model, as ``save_pretrained`` writes it: ``config.json`` and ``.safetensors``.
        task: ``"causal"`` for a language model, ``"classification"`` for a classifier of whole texts. If the
            folder has no weights for the head, the head is initialized randomly. If labels are words, the saved
            config contains them (``id2label``).
        num_classes: number of classes of a classifier. Default: None, that of the data if its labels are words, or else
            that of the model. If the folder's head has another size, a new one is created.
        lora_rank: rank of the adapters that are trained instead of the weights (needs ``peft``); None: all weights.
        lora_alpha: the adapters' output is multiplied by this value divided by the rank.
        lora_dropout: probability that an input of an adapter is set to zero in training.
        lora_modules: the layers that get adapters: names or ends of names, such as ``["q_proj", "v_proj"]``; None: all
            linear layers except the head.
        attention: the implementation, ``"sdpa"`` (torch's), or ``"eager"`` for architectures that support nothing else.
        save_to: folder that the model is written to at the end of a fit; None: it is not written.
        sample_length: number of tokens that `predict_step` of a language model generates; each is the most likely one.

    Attributes:
        net: the model, after `configure_model`.

    Raises:
        FileNotFoundError: the folder does not exist, or contains no model.
        ModuleNotFoundError: ``transformers`` or, for LoRA, ``peft`` is not installed.
        ValueError: the model needs custom code or has pickles instead of ``.safetensors``, the task is unknown,
            ``num_classes`` is below 2 or differs from the data, or the weights do not match the folder's config.
    """

    net: nn.Module

    def __init__(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
        *,
        folder: str,
        task: Task = "causal",
        num_classes: int | None = None,
        lora_rank: int | None = None,
        lora_alpha: float = 16.0,
        lora_dropout: float = 0.0,
        lora_modules: Sequence[str] | None = None,
        attention: str = "sdpa",
        save_to: str | None = None,
        sample_length: int = 100,
    ) -> None:
        super().__init__()
        if task not in _CLASSES:
            raise ValueError(f"task is {task!r}, expected 'causal' or 'classification'.")
        if num_classes is not None and num_classes < 2:
            raise ValueError(f"num_classes is {num_classes}, expected at least 2, or null for that of the model.")
        self.folder = check_folder(folder)
        _need("transformers", "to fine-tune a model")
        if lora_rank is not None:
            _need("peft", "for LoRA (model.lora_rank)")
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.task = task
        self.num_classes = num_classes
        self.lora_rank = lora_rank
        self.lora_alpha = lora_alpha
        self.lora_dropout = lora_dropout
        self.lora_modules = lora_modules
        self.attention = attention
        self.save_to = save_to
        self.sample_length = sample_length
        for stage in ("val", "test"):
            setattr(self, f"{stage}_loss", Ratio())
            setattr(self, f"{stage}_{self._metric}", Perplexity() if task == "causal" else Ratio())

    @property
    def _metric(self) -> str:
        return "perplexity" if self.task == "causal" else "acc"

    @cached_property
    def tokenizer(self) -> FileTokenizer:
        """The tokenizer in the model's folder."""
        return FileTokenizer(str(self.folder))

    def configure_model(self) -> None:
        """Read the model into the host's memory, in each process. A second call is a no-op.

        A strategy that shards takes its shards from these copies. LoRA's adapters and a new head are initialized with
        torch's random numbers, which are the same in all processes after ``seed_everything``.
        """
        if hasattr(self, "net"):
            return
        import transformers

        place = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(self.folder, **place)
        classes = config.num_labels
        if self.task == "classification":
            self._set_classes(config)
        # the weights are in files, so load them even under torch.device("meta")
        is_meta = torch.get_default_device().type == "meta"
        with torch.device("cpu") if is_meta else torch.get_default_device():
            net, report = getattr(transformers, _CLASSES[self.task]).from_pretrained(
                self.folder,
                config=config,
                use_safetensors=True,
                dtype=torch.get_default_dtype(),
                attn_implementation=self.attention,
                ignore_mismatched_sizes=classes != config.num_labels,
                output_loading_info=True,
                **place,
            )
            for name, old, new in sorted(report["mismatched_keys"]):
                if (old[0], new[0]) != (classes, config.num_labels):
                    raise ValueError(f"{name} in {self.folder} has shape {old}, but its config.json implies {new}.")
            if created := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
                head = f" with {config.num_labels} classes" if self.task == "classification" else ""
                rank_zero_warn(
                    f"{self.folder} has no head{head}: {', '.join(created)} are new and random until they are trained"
                    " or read from a checkpoint."
                )
            self.net = net if self.lora_rank is None else self._with_adapters(net)
        self.net.train()

    def _set_classes(self, config: Any) -> None:
        """Set the number of classes, their words, and the padding token, from which a decoder finds the last token."""
        words = self._words
        if words and self.num_classes not in (None, len(words)):
            raise ValueError(
                f"num_classes is {self.num_classes}, but the data has the {len(words)} classes"
                f" {', '.join(map(repr, words))}. Set model.num_classes=null, or list all classes: data.classes=[...]."
            )
        if words:
            _set_words(config, words)
        elif self.num_classes not in (None, config.num_labels):
            config.num_labels = self.num_classes
        if config.num_labels < 2:
            raise ValueError(
                f"{words or self.folder} has {config.num_labels} class, expected at least 2. Set model.num_classes, or"
                " list the words of all classes: data.classes=[...]."
            )
        self.hparams["num_classes"] = config.num_labels  # for load_from_checkpoint
        text_config = config.get_text_config()
        if text_config.pad_token_id is None:
            text_config.pad_token_id = self.tokenizer.end if self.tokenizer.pad is None else self.tokenizer.pad

    @property
    def _words(self) -> list[str] | None:
        """The words of the classes in the data, if its labels are words."""
        return getattr(getattr(self._trainer, "datamodule", None), "classes", None)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the words of the classes, which the order of the head's outputs depends on."""
        if self.task == "classification":
            checkpoint["classes"] = list(self.net.config.id2label.values())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the words of the classes.

        Raises:
            ValueError: the data has other words, or another order.
        """
        words = checkpoint.get("classes")
        if words and self._words and list(self._words) != words:
            raise ValueError(
                f"The classes of the data are {', '.join(map(repr, self._words))}, but those of the checkpoint are"
                f" {', '.join(map(repr, words))}. Set data.classes=[{','.join(words)}]."
            )
        if words:
            _set_words(self.net.config, words)

    def _with_adapters(self, net: nn.Module) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            task_type="CAUSAL_LM" if self.task == "causal" else "SEQ_CLS",  # for SEQ_CLS, the new head is trained, too
            r=self.lora_rank,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules="all-linear" if self.lora_modules is None else list(self.lora_modules),
        )
        with warnings.catch_warnings():  # peft 0.21 reads an attribute of transformers 5 by its old name
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            return get_peft_model(net, config)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits of shape (batch, length, vocabulary) or, for a classifier, (batch, ``num_classes``)."""
        return self._logits(tokens, mask)

    def _logits(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        more = {"use_cache": False} if self.task == "causal" else {}  # disable the key-value cache
        pad = self.net.config.get_text_config().pad_token_id
        if mask is not None and pad is not None:
            tokens = tokens.masked_fill(mask == 0, pad)  # some models find the last token, or positions, by it
        logits: Tensor = self.net(input_ids=tokens, attention_mask=mask, **more).logits
        return logits

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss of a batch, a scalar, and the number of targets as its weight."""
        nats, count, _ = self._count(batch)
        loss = nats / count
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss, "weight": count}

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_perplexity`` or ``val_acc``."""
        self._evaluate("val", batch)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_perplexity`` or ``test_acc``."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> list[str] | Tensor:
        """Return the prompts with their continuations (language model), or probabilities (classifier).

        The probabilities have shape (batch, ``num_classes``), float32.
        """
        if self.task == "causal":
            if not isinstance(batch[0], str):
                raise ValueError(
                    "predict of a language model continues prompts, but there are no prompts. Set data.prompts."
                )
            return [prompt + self.write(prompt) for prompt in batch]
        tokens, *mask, _ = batch
        return self(tokens, *mask).float().softmax(dim=1)

    @torch.no_grad()
    def write(self, prompt: str) -> str:
        """Return the continuation of ``prompt``: ``sample_length`` tokens, or fewer if the model ends the document.

        If the weights are sharded, all ranks must call it with the same prompt.
        """
        stream = [*self.tokenizer.begin, *self.tokenizer.encode([prompt])[0]] or [self.tokenizer.end]
        start = len(stream)
        longest = getattr(self.net.config, "max_position_embeddings", None) or len(stream) + self.sample_length
        for _ in range(self.sample_length):
            tokens = torch.tensor([stream[-longest:]], device=self.device)
            stream.append(int(self(tokens)[0, -1].argmax()))  # a host-device synchronization
            if stream[-1] == self.tokenizer.end:
                stream.pop()
                break
        return self.tokenizer.decode(stream[start:])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer, with weight decay only on matrices, and the schedule, if there is one."""
        parameters = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        groups = [
            {"params": [parameter for parameter in parameters if parameter.ndim >= 2]},
            {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
        ]
        return with_schedule(self.make_optimizer([g for g in groups if g["params"]]), self.make_scheduler, self)

    def on_fit_end(self) -> None:
        """Write the model to ``save_to``."""
        if self.save_to is not None:
            self.save_pretrained(self.save_to)

    def save_pretrained(self, folder: str) -> None:
        """Write the tokenizer and the model, or only LoRA's adapters, in the format of ``transformers`` and ``peft``.

        All processes of a sharded model must call it; the first one writes.

        Args:
            folder: created if it does not exist; files of the same names are overwritten.
        """
        only_trained = self.lora_rank is not None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=only_trained)
        state = get_model_state_dict(self.net, options=options)
        if self.global_rank == 0:
            self.net.save_pretrained(folder, state_dict=state)
            for name in _TOKENIZER_FILES:
                if (self.folder / name).is_file():
                    shutil.copyfile(self.folder / name, Path(folder) / name)

    def _evaluate(self, stage: str, batch: Sequence[Tensor]) -> None:
        nats, count, right = self._count(batch)
        for name, amount in (("loss", nats), (self._metric, nats if right is None else right)):
            metric = getattr(self, f"{stage}_{name}")
            metric.update(amount, count)
            self.log(f"{stage}_{name}", metric, on_step=False, on_epoch=True, prog_bar=True)

    def _count(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the sum of the losses in nats, their number, and, for a classifier, the number of correct classes."""
        tokens, *mask, targets = batch
        logits = self._logits(tokens, *mask)
        if self.task == "causal":
            return *sum_of_losses(logits, targets), None
        right = (logits.argmax(dim=1) == targets).sum()
        return F.cross_entropy(logits, targets, reduction="sum"), torch.ones_like(targets).sum(), right


def check_folder(folder: str) -> Path:
    """Return the path of a model's folder if it can be read without running any code from it.

    Raises:
        FileNotFoundError: the folder does not exist, or contains no model.
        ValueError: the weights are pickles, or the model needs custom code.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise FileNotFoundError(
            f"folder is {folder}, but the folder {place.resolve()} does not exist. Expected one written by"
            " model.save_pretrained(FOLDER) of transformers; this recipe downloads no models. Set model.folder."
        )
    config = place / "config.json"
    if not config.is_file():
        adapters = " It has only LoRA adapters: set the model that they belong to."
        raise FileNotFoundError(
            f"{place.resolve()} has no model: it has no config.json."
            f"{adapters * (place / 'adapter_config.json').is_file()} Expected the files of model.save_pretrained."
        )
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config.resolve()} is not valid JSON: {error}.") from error
    if "auto_map" in settings:
        raise ValueError(
            f"The model in {place.resolve()} contains custom code ({settings['auto_map']}), which is not run."
            " Use an architecture of transformers, or write a LightningModule that imports the code."
        )
    if not any(place.glob("*.safetensors")):
        pickles = ", ".join(sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in place.glob(pattern)))
        if not pickles:
            raise FileNotFoundError(
                f"{place.resolve()} has no weights: it has no .safetensors. Expected the files of"
                " model.save_pretrained(FOLDER)."
            )
        raise ValueError(
            f"The weights in {place.resolve()} are pickles ({pickles}), which can run code, so they are not read. If"
            " you trust the model, load it yourself, and save it as .safetensors with model.save_pretrained(FOLDER)."
        )
    return place


def _set_words(config: Any, words: Sequence[str]) -> None:
    config.id2label = dict(enumerate(words))
    config.label2id = {word: place for place, word in enumerate(words)}


def _need(package: str, purpose: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{package} is needed {purpose}, and is not installed: pip install {package}.", name=package
        )
