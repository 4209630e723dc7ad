"""A transformer that writes like the Zen of Python: warm-up by step, accumulation, an own loop of generation."""

import codecs
import math
import this

import torch
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.text import Perplexity

TEXT = codecs.decode(this.s, "rot13")
CHARACTERS = sorted(set(TEXT))


class Characters(Dataset):
    def __init__(self, text, context):
        self.tokens = torch.tensor([CHARACTERS.index(character) for character in text])
        self.context = context

    def __len__(self):
        return len(self.tokens) - self.context

    def __getitem__(self, start):
        window = self.tokens[start : start + self.context + 1]
        return window[:-1], window[1:]


class Zen(LightningDataModule):
    def __init__(self, context=24, batch_size=32):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        split = int(0.8 * len(TEXT))
        self.train_set = Characters(TEXT[:split], self.hparams.context)
        self.val_set = Characters(TEXT[split:], self.hparams.context)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)


class Transformer(LightningModule):
    def __init__(self, width=32, heads=4, layers=2, context=24, learning_rate=3e-3, warmup=4):
        super().__init__()
        self.save_hyperparameters()
        self.token = nn.Embedding(len(CHARACTERS), width)
        self.position = nn.Parameter(torch.zeros(context, width))
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(CHARACTERS))
        self.perplexity = Perplexity()

    def forward(self, tokens):
        length = tokens.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.token(tokens) + self.position[:length]
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))

    def loss(self, logits, targets):
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        loss = self.loss(self(tokens), targets)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        tokens, targets = batch
        logits = self(tokens)
        self.perplexity(logits, targets)
        self.log("val_loss", self.loss(logits, targets), prog_bar=True)
        self.log("val_perplexity", self.perplexity)

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.dim() > 1]
        other = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": other, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate)
        total, warmup = self.trainer.max_epochs * self.trainer.num_training_batches, self.hparams.warmup

        def factor(step):
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup))))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    @torch.no_grad()
    def write(self, beginning, length):
        self.eval()
        tokens = torch.tensor([[CHARACTERS.index(character) for character in beginning]], device=self.device)
        for _ in range(length):
            following = self(tokens[:, -self.hparams.context :])[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
        return "".join(CHARACTERS[token] for token in tokens[0])


def main(folder):
    seed_everything(11, workers=True)
    model, zen = Transformer(), Zen()
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=CSVLogger(folder),
        callbacks=[
            ModelCheckpoint(monitor="val_loss", save_last=True, save_top_k=2),
            LearningRateMonitor("step"),
            GradientAccumulationScheduler({0: 1, 1: 2}),
            Timer("00:01:00:00"),
        ],
        val_check_interval=0.5,
        limit_train_batches=16,
        limit_val_batches=2,
        log_every_n_steps=2,
        gradient_clip_val=0.5,
    )
    trainer.fit(model, datamodule=zen)
    (validated,) = trainer.validate(model, datamodule=zen, ckpt_path="last")
    return {
        "weights": model.state_dict(),
        "validated": validated,
        "written": model.write("Beautiful is", 12),
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "steps": trainer.global_step,
    }
