"""What ``torch.optim`` lacks: Muon and loss scaling, both correct on sharded tensors."""
