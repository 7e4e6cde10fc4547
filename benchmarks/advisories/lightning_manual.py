"""Lightning with its own loop for optimization (automatic_optimization = False), in DDP."""

import argparse
import os
import tempfile

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=4, help="of a rank")
parser.add_argument("--static-graph", action="store_true")
args = parser.parse_args()


class Regression(LightningModule):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, index):
        inputs, targets = batch
        self.manual_backward(nn.functional.mse_loss(self(inputs), targets))

    def on_train_batch_end(self, *unused):
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    seed_everything(0)
    model = Regression()
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        plugins=[TorchElasticEnvironment()],
        strategy=DDPStrategy(static_graph=args.static_graph),
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, args.samples))
