"""transformers and timm: their models, optimizers and schedules in modules as people write them."""

from __future__ import annotations

from typing import Any

import timm
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, WeightAveraging
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    get_linear_schedule_with_warmup,
)

REQUIRES = ("transformers==5.23.0", "timm==1.0.31", "torchvision==0.29.2", "torch==2.15.0", "lightning==2.6.6")


class Sentences(Dataset[dict[str, Tensor]]):
    """Random words; the label is 1 if the first one is odd. Items are dicts of sentences padded to 12 words."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(4, 60, (count, 12), generator=generator)
        self.lengths = torch.randint(6, 13, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(12) < self.lengths[index]).long()
        return {"input_ids": self.words[index] * mask, "attention_mask": mask, "labels": self.words[index, 0] % 2}


class Data(LightningDataModule):
    """Read the batch size from the hyperparameters, as Lightning's templates do."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Create the datasets."""
        self.train, self.val = Sentences(76, 1), Sentences(24, 2)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    predict_dataloader = test_dataloader = val_dataloader


class Classifier(LightningModule):
    """BERT with its config and its loss as hyperparameters, weight decay by groups, a linear schedule with warm-up."""

    def __init__(
        self, config: dict[str, int], loss: nn.Module | None = None, learning_rate: float = 1e-3, warmup: float = 0.1
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = BertForSequenceClassification(BertConfig(**config))
        self.loss = loss
        self.accuracy = MulticlassAccuracy(2)
        self.predicted: list[Tensor] = []

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self(**batch).logits, batch["labels"])
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        output = self(**batch)
        self.accuracy(output.logits, batch["labels"])
        self.predicted.append(output.logits.argmax(-1))
        self.log_dict({"val/loss": output.loss, "val/accuracy": self.accuracy}, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val/share", torch.cat(self.predicted).float().mean())
        self.predicted.clear()

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(**batch).logits.softmax(-1)

    def configure_optimizers(self) -> Any:
        plain = ("bias", "LayerNorm.weight")
        groups = [
            {"params": [p for n, p in self.named_parameters() if not n.endswith(plain)], "weight_decay": 0.01},
            {"params": [p for n, p in self.named_parameters() if n.endswith(plain)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, eps=1e-8)
        steps = self.trainer.estimated_stepping_batches
        schedule = get_linear_schedule_with_warmup(optimizer, int(self.hparams.warmup * steps), steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]


def bert(run: Any, **options: Any) -> None:
    """Fit, test, predict, reload, resume."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {**sizes, "intermediate_size": 48, "max_position_embeddings": 16}

    def callbacks() -> list[Any]:
        saver = ModelCheckpoint(
            monitor="val/loss",
            save_top_k=-1,
            save_last=True,
            save_on_train_epoch_end=True,
            filename="{epoch}-{val/loss:.2f}",
        )
        return [saver, LearningRateMonitor("step"), EarlyStopping("val/loss", patience=4)]

    def module() -> Classifier:
        return Classifier(config, nn.CrossEntropyLoss(label_smoothing=0.1))

    fitted = module()
    trainer = run.Trainer(max_epochs=2, callbacks=callbacks(), **options)
    trainer.fit(fitted, datamodule=Data())
    path = trainer.checkpoint_callback.last_model_path  # the test loads the best checkpoint instead
    run.keep("test", trainer.test(ckpt_path="best", datamodule=Data(), weights_only=False, verbose=False))
    run.keep("predicted", trainer.predict(fitted, datamodule=Data(6)))
    again = run.reload(Classifier, path)
    run.keep("loss", again.loss)
    run.reload(Data, path)
    with run.resume():
        further = run.Trainer(max_epochs=2, callbacks=callbacks(), **options)
        first = next(run.folder.rglob("epoch=0-val/*.ckpt"))
        further.fit(module(), datamodule=Data(), ckpt_path=first, weights_only=False)


def case_bert(run: Any) -> None:
    """BERT, AdamW by groups, linear warm-up, accumulation over windows that divide the epoch, clipping"""
    bert(run, accumulate_grad_batches=5, gradient_clip_val=1.0, val_check_interval=0.5)


def case_bert_bf16(run: Any) -> None:
    """The same in bf16-mixed, without accumulation"""
    bert(run, precision="bf16-mixed", gradient_clip_val=1.0)


def case_bert_true_bf16(run: Any) -> None:
    """The same with weights in bf16"""
    bert(run, precision="bf16-true")


class LanguageModel(LightningModule):
    """GPT-2 with tied weights and gradient checkpointing. Its step returns transformers' output class."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_head": 2}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, n_layer=layers, bos_token_id=1, eos_token_id=2))
        self.model.gradient_checkpointing_enable()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        words = batch["input_ids"]
        output = self.model(input_ids=words, attention_mask=batch["attention_mask"], labels=words)
        self.log("loss", output.loss, on_epoch=True)
        return output

    def on_train_epoch_end(self) -> None:
        self.model.eval()
        start = torch.randint(4, 60, (1, 2))
        made = self.model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=4, do_sample=True)
        self.log("made", made.float().mean())
        self.model.train()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def case_gpt2(run: Any) -> None:
    """GPT-2: tied weights, gradient checkpointing, a ModelOutput returned, text sampled at the epoch's end"""
    module = LanguageModel()
    trainer = run.Trainer(max_epochs=2, callbacks=[WeightAveraging(avg_fn=get_ema_avg_fn(0.9))])
    trainer.fit(module, DataLoader(Sentences(40, 3), batch_size=8, shuffle=True))
    run.reload(LanguageModel, trainer.checkpoint_callback.best_model_path)


class Images(LightningModule):
    """A timm model trained timm's way: its optimizer and schedule, mixup, averaged weights in the state dict."""

    def __init__(self, name: str, optimizer: str, learning_rate: float, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = timm.create_model(name, num_classes=4, **options)
        self.average = ModelEmaV3(self.model, decay=0.9)
        self.mixup = Mixup(mixup_alpha=0.4, cutmix_alpha=0.5, label_smoothing=0.1, num_classes=4)
        self.loss = SoftTargetCrossEntropy()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        images, labels = self.mixup(*batch)
        loss = self.loss(self.model(images), labels)
        self.log("train_loss", loss)
        return {"loss": loss, "labels": labels.argmax(-1)}

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average.update(self.model)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        for name, model in (("plain", self.model), ("average", self.average.module)):
            logits = model(images)
            self.log(f"val_{name}", nn.functional.cross_entropy(logits, labels))

    def configure_optimizers(self) -> Any:
        optimizer = create_optimizer_v2(
            self.model, opt=self.hparams.optimizer, lr=self.hparams.learning_rate, weight_decay=0.05, layer_decay=0.8
        )
        schedule = CosineLRScheduler(optimizer, t_initial=4, lr_min=1e-5, warmup_t=1, warmup_lr_init=1e-4)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch + 1, metric=metric)


def images(count: int, size: int, seed: int, **options: Any) -> Any:
    """Return a dataloader of images of noise that are brighter for larger labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    pictures = torch.randn(count, 3, size, size, generator=generator) + labels[:, None, None, None] / 3
    return DataLoader(TensorDataset(pictures, labels), batch_size=8, **options)


def picture_classifier(run: Any, size: int, make: Any, **options: Any) -> None:
    """Fit, validate, reload, resume."""
    train, val = images(32, size, 1, shuffle=True, drop_last=True), images(16, size, 2)

    def callbacks() -> list[Any]:
        return [LearningRateMonitor(), ModelCheckpoint(monitor="val_average", save_last=True)]

    module = make()
    trainer = run.Trainer(max_epochs=2, callbacks=callbacks(), **options)
    trainer.fit(module, train, val)
    run.keep("validated", trainer.validate(module, val, verbose=False))
    path = trainer.checkpoint_callback.last_model_path
    run.reload(Images, path)
    with run.resume():
        further = run.Trainer(max_epochs=2, callbacks=callbacks(), **options)
        further.fit(make(), train, val, ckpt_path=path)


def case_resnet(run: Any) -> None:
    """resnet18 of timm, its LAMB and cosine schedule, mixup, EMA in on_before_zero_grad"""
    picture_classifier(run, 16, lambda: Images("resnet18", "lamb", 2e-3), gradient_clip_val=1.0)


def case_vit(run: Any) -> None:
    """A small ViT of timm, AdamW with layer decay, drop path, bf16-mixed, accumulation"""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "drop_path_rate": 0.1}
    picture_classifier(
        run, 32, lambda: Images("vit_tiny_patch16_224", "adamw", 1e-3, **sizes),
        precision="bf16-mixed", accumulate_grad_batches=2,
    )  # fmt: skip


def case_optimizers(run: Any) -> None:
    """timm's Lookahead around RAdam, Adan, and MADGRAD"""
    for optimizer in ("lookahead_radam", "adan", "madgrad"):
        module = Images("resnet18", optimizer, 1e-3)
        run.Trainer(max_epochs=2).fit(module, images(16, 16, 1), images(8, 16, 2))
