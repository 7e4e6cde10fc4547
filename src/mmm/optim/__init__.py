"""What ``torch.optim`` lacks: LARS, LAMB, Muon and loss scaling, all correct on sharded tensors."""
