"""A script as users of transformers write it: the Trainer on a small model, dense or with experts."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


class Text(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(64, (32, 12), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--router-loss", type=float)
    parser.add_argument("--per_device_train_batch_size", type=int, default=2)
    parser.add_argument("--output_dir", default="outputs")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    if args.router_loss is not None:
        config = MixtralConfig(
            **SIZES, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=args.router_loss
        )
        model = MixtralForCausalLM(config)
    training = TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.per_device_train_batch_size,
        max_steps=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    Trainer(model=model, args=training, train_dataset=Text()).train()


if __name__ == "__main__":
    main()
