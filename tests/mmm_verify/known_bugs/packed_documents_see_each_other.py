"""A rank does not know where the documents of a packed sequence begin, so they see each other.

Several documents share a sequence, and attention or a recurrent state must not cross from one to the next. The
boundaries get lost on their way to the layer, for some layouts only. The loss is near the right one, as a document
hardly helps to predict another. The right program passes the boundaries of the whole sequence.

NovaSky-AI/SkyRL#2056 (recurrent state), and NVIDIA/Megatron-LM#6205 for boundaries at wrong places.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import add_up, gather_summed
from support.known_bugs import KnownBug, Program, own_part


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 4, bias=False) for _ in range(3))
        self.mesh = None
        self.forgets = False

    def forward(self, x, documents):
        # (batch, own positions, 6), (batch, own positions) → (batch, own positions, 4)
        q, k, v = self.query(x), self.key(x), self.value(x)
        length = x.shape[1]
        first = 0
        all_documents = documents
        if self.mesh is not None:
            group = self.mesh.get_group()
            k, v = gather_summed(k, group, 1), gather_summed(v, group, 1)
            all_documents = gather_summed(documents, group, 1)
            first = self.mesh.get_local_rank() * length
        visible = torch.ones(length, k.shape[1]).tril(first).bool()
        if not self.forgets:
            # (batch, own positions, all positions)
            visible = visible & (documents[..., None] == all_documents[:, None])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def make_batch():
    documents = torch.tensor([0, 0, 1, 1, 1, 2]).expand(4, 6)
    return torch.randn(4, 6, 6), documents.clone(), torch.randn(4, 6, 4)


def parallelize(model, mesh):
    model.mesh = mesh
    add_up(model, mesh)


def forgets_the_documents(model, mesh):
    parallelize(model, mesh)
    # Wrong: a token may see only its own document.
    model.forgets = True


def step(model, batch, mesh):
    count = batch[2].numel()
    if mesh is not None:
        batch = [own_part(tensor, mesh, 1) for tensor in batch]
    inputs, documents, targets = batch
    return F.mse_loss(model(inputs, documents), targets, reduction="sum") / count


BUG = KnownBug(
    title="packed documents see each other",
    reports=("NovaSky-AI/SkyRL#2056", "NVIDIA/Megatron-LM#6205"),
    model=Attention,
    batch=make_batch,
    mesh="cp2",
    right=Program(parallelize, step),
    wrong=Program(forgets_the_documents, step),
    first="output of the model on rank 0",
    says="the loss",
)
