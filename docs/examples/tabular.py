"""Classify tumors as benign or malignant in mixed precision. The data comes with scikit-learn."""

import lightning as L
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from trainer import Trainer


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(30, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        self.accuracy = MulticlassAccuracy(num_classes=2, average="micro")

    def training_step(self, batch, batch_idx):
        features, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(features), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        features, labels = batch
        self.accuracy(self.net(features), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


L.seed_everything(0)
features, labels = load_breast_cancer(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(features, labels, test_size=0.2, stratify=labels, random_state=0)
scaler = StandardScaler().fit(train_x)  # fitted on the training rows only
train, test = (
    TensorDataset(torch.tensor(scaler.transform(x)).float(), torch.tensor(y))
    for x, y in ((train_x, train_y), (test_x, test_y))
)

model = Classifier()
trainer = Trainer(precision="16-mixed", max_epochs=20, log_every_n_steps=5)
trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))
trainer.test(model, DataLoader(test, batch_size=32))
print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}, {trainer.skipped_steps} skipped steps")
