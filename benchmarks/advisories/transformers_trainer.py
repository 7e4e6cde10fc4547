"""transformers' Trainer on samples with unequal numbers of labels, as chats have them."""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=2, help="of a rank, in a micro-batch")
parser.add_argument("--parts", type=int, default=1, help="micro-batches of a step")
parser.add_argument("--short", type=int, default=0, help="of how many samples every other run has few labels")
parser.add_argument("--model", default="llama")
args = parser.parse_args()


def make_sample(index):
    tokens = torch.randint(32, (12,), generator=torch.Generator().manual_seed(index))
    labels = tokens.clone()
    if args.short and index // args.short % 2:
        labels[:9] = -100
    return {"input_ids": tokens, "labels": labels}


class InOrder(Trainer):
    def _get_train_sampler(self, *unused):
        return torch.utils.data.SequentialSampler(self.train_dataset)


torch.manual_seed(0)
configs = {
    "llama": LlamaConfig(32, 16, 32, num_hidden_layers=1, num_attention_heads=2),
    "gpt2": GPT2Config(32, 16, 16, n_layer=1, n_head=2),
}
model = AutoModelForCausalLM.from_config(configs[args.model])
settings = TrainingArguments(
    tempfile.mkdtemp(),
    use_cpu=True,
    report_to=[],
    per_device_train_batch_size=args.samples,
    gradient_accumulation_steps=args.parts,
    max_steps=3,
    optim="adamw_torch",
    max_grad_norm=0.0,
    disable_tqdm=True,
)
InOrder(model, settings, train_dataset=[make_sample(i) for i in range(64)]).train()
